"""The whole policy loss: start reading at :mod:`mis_ext.loss.policy`."""
