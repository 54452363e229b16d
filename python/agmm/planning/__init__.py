"""The planner, which says which transport and kernel a call gets."""
