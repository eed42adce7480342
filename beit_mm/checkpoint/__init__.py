"""Reading weights from any file without running what it holds."""
