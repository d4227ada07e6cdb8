"""trueup: bring a trained network's activations back into line, at test time, image by image."""
