"""Reading and writing model files and run state."""
