"""Training with less memory than an optimizer's state needs: it waits elsewhere."""
