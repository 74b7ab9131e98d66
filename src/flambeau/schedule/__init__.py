"""Turns a graph into a program: fusion, order, memory plan, numerics policy."""
