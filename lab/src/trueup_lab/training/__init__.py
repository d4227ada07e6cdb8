"""Training of the source models: many seeds at once on one device, or ImageNet on many devices."""
