"""Models and records for tests of gradients, their gradients by definition, and single gradients in every form."""
