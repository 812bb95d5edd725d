"""Tasks over documents: mail, read as hostile input, and text."""
