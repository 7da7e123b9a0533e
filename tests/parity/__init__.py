"""What the losses of other trainers say, and what they were asked."""
