"""Operations in graphs: their library and names, tracing, order, XLA."""
