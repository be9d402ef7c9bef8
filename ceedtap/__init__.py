"""ceedtap: libCEED operators inside JAX programs, and taps that stream arrays out of them."""

from ceedtap.consumer import Consumer as Consumer
from ceedtap.consumer import Tap as Tap
from ceedtap.outfeed import CallbackException as CallbackException
from ceedtap.outfeed import barrier_wait as barrier_wait
from ceedtap.outfeed import outfeed_receiver as outfeed_receiver
from ceedtap.primitive import id_print as id_print
from ceedtap.primitive import id_tap as id_tap

__version__ = "0.1.0"
