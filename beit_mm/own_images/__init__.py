"""The application: plans a run on a folder of images, keeps its minutes, and reports whether its weights are good."""
