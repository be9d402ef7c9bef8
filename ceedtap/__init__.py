"""ceedtap: libCEED operators inside JAX programs, and taps that stream arrays out of them."""
