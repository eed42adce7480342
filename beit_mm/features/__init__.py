"""Features of images, and what a classifier of them alone reaches."""
