"""Which transport and kernel a call gets."""
