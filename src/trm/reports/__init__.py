"""Everything that reads a run: the live view, the report, diagnosis, TensorBoard. Nothing here trains."""
