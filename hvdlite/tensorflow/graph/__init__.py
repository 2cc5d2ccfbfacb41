"""Operations in graphs: their library and names, tracing, loops, order, XLA."""
