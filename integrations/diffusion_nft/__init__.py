"""DiffusionNFT on Stable Diffusion 3 with several rewards, balanced by gradbalance."""
