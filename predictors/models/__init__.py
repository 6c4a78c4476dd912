"""Laboratory models: the demo model's training, and a dense model that is cut into experts."""
