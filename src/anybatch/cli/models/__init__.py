"""The built-in models: ResNets, U-Net, AmoebaNet-D and a small network for digits."""
