"""Networks in which samples do not couple, or only in BatchNorm: none may be refused."""
