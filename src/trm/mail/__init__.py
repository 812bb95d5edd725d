"""A private mail classifier: trained on one's own mail, used on one's own machine."""
