"""Speed and memory of clipped gradients, side by side with the libraries that also compute them."""
