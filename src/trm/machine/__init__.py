"""This machine: what it can do (`trm doctor`) and how fast it trains (`trm bench`)."""
