"""Contrastive training beside GradCache and sentence-transformers."""
