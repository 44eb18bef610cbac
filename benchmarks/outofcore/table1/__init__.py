"""The paper's Table 1 on a device: ResNet-50 at batches that do not fit."""
