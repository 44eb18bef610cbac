"""Networks of timm and torchvision, in an environment of their own: none may be refused."""
