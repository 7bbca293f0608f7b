"""Blockyard inside engines that exist: adapters, which import the engine and public names of Blockyard alone."""
