//! Attacks from outside: what a stranger on the network, a careless producer or a full disk does to the real binary.

mod dead_letters;
mod files;
mod http;
mod params;
mod spaces;
mod time;
