"""Tasks: files become token arrays, and answers become something that a person reads."""
