"""Applying a trained model: test-time search, and predictions for people."""
