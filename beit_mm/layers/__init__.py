"""nn.Modules that need torch alone."""
