"""Model families as layers in order."""
