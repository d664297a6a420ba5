"""The load test: a client of OpenAI's API that imports no other package of this project."""
