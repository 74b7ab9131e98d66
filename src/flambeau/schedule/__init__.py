"""From a graph to a program: fusion, order, memory plan, numerics policy."""
