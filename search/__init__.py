"""Search: indexes of vectors, the process that keeps them, and the commands around it."""
