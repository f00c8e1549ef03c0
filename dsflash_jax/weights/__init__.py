"""Released tensor names and the parameter tree."""
