"""Recipe x this machine -> plan, by measurement."""
