"""The commands of who deploys: pack a directory, upload what is missing, say what is to be served."""
