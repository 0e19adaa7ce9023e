//! Hypentropy policy gradient: the mathematics of the paper, in f64.
//!
//! | symbol | here | shape |
//! |---|---|---|
//! | M, d, k | models, dimension of queries, rank kept of each model | |
//! | q | query of unit norm | d |
//! | pi(m \| q) | policy: softmax over models of the score q'W_m q | M |
//! | W_m = U diag(lambda) U' | parameter of model m, symmetric, nuclear norm at most tau | d x d |
//! | Y_m = U diag(gamma) U' | its mirror image; lambda = beta sinh gamma | d x d |
//! | r, b | reward in 0..1, baseline | |
//! | c_m | (r - b)(1\[m = m_t\] - pi_m), weighted: the gradient is -c_m q q' | M |
//! | eta, beta, tau | learning rate, hypentropy scale, radius of the ball | |
//!
//! One step of Algorithm 1 is: coefficients ([`gradient`]), Y_m + eta c_m q q' as an eigen-update ([`spectra`], and
//! below it [`secular`]), projection ([`projection`]). After the projection gamma = arcsinh(lambda / beta) exactly, so
//! the state is (U, gamma) and the paper's moves to the mirror space and back cost nothing.
//!
//! [`learner`] estimates the gradient by REINFORCE, as the paper does; [`actor_critic`] takes the expected gradient under a
//! [`critic`].

pub mod actor_critic;
pub mod aligned;
pub mod coin;
pub mod critic;
pub mod directions;
pub mod drift;
pub mod eigenvectors;
pub mod factored;
pub mod gradient;
pub mod kernel;
pub mod learner;
pub mod linalg;
pub mod overlap;
pub mod parameter_free;
pub mod projection;
pub mod regression;
pub mod roots;
pub mod schedule;
pub mod secular;
pub mod spectra;
