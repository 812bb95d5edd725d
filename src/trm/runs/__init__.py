"""Run directories: what is in them, who writes them, and how others read them."""
