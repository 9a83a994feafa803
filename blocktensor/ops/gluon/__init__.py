"""Kernels in Gluon, where the layout of registers decides the speed."""
