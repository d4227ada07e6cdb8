"""Training of the source models: recipes as data, many seeds at once on one device, ImageNet on many."""
