"""Data sets, clean and corrupted."""
