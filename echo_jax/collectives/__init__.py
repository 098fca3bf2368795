"""Collectives: how ranks exchange payloads, whose bit layout is not known here."""

from echo_jax.collectives.psum import echo_psum as echo_psum
from echo_jax.collectives.psum import echo_pvary as echo_pvary
from echo_jax.collectives.psum import flush as flush
from echo_jax.collectives.scatter_gather import echo_all_gather as echo_all_gather
from echo_jax.collectives.scatter_gather import echo_psum_scatter as echo_psum_scatter
from echo_jax.collectives.traffic import Explanation as Explanation
from echo_jax.collectives.traffic import explain as explain
from echo_jax.collectives.traffic import wire_bytes as wire_bytes
