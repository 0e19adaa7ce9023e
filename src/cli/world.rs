//! Options of the simulated environment.

use clap::ValueEnum;

use crate::simulate::World;
use crate::simulate::items::{Items, ItemsSpec};
use crate::simulate::log_quadratic::{LogQuadratic, LogQuadraticSpec};
use crate::simulate::queries::Shape;

/// Options of all commands that simulate.
#[derive(Debug, clap::Args)]
pub struct WorldArgs {
    /// How expected rewards depend on query and model
    #[arg(long, value_enum, default_value_t = WorldKind::LogQuadratic)]
    pub world: WorldKind,
    /// Distribution of the queries
    #[arg(long, value_enum, default_value_t = ShapeKind::PowerLaw)]
    pub queries: ShapeKind,
    /// Rank of the models' kernels (the paper's s)
    #[arg(long, default_value_t = 2, value_parser = positive)]
    pub intrinsic_rank: usize,
    /// Standard deviation of expected rewards over queries and models, before clipping to 0..1
    #[arg(long, default_value_t = 0.3, value_parser = positive_number)]
    pub signal: f64,
    /// Number of items (--world items)
    #[arg(long, default_value_t = 100, value_parser = positive)]
    pub items: usize,
    /// Softmax temperature of the models' recommendations (--world items)
    #[arg(long, default_value_t = 0.05, value_parser = positive_number)]
    pub temperature: f64,
    /// Bound on the reward that the kernels do not explain (--world items)
    #[arg(long, default_value_t = 0.05, value_parser = share)]
    pub misspecification: f64,
}

/// How expected rewards depend on query and model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WorldKind {
    /// Expected reward 0.5 + q'Wq, clipped: matches the policy class exactly
    LogQuadratic,
    /// The paper's environment: models recommend items, items earn rewards
    Items,
}

/// Distribution of the queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ShapeKind {
    /// Amplitude of direction j is proportional to 1/j: few directions matter, as in real embeddings
    PowerLaw,
    /// All directions equal
    Isotropic,
    /// Clustered around topics
    Clustered,
}

impl WorldArgs {
    /// Description of the environment.
    pub fn facts(&self, dim: usize, models: usize) -> Vec<(&'static str, String)> {
        let mut facts = vec![
            ("dimension", dim.to_string()),
            ("models", models.to_string()),
            ("world", name(self.world)),
            ("query spectrum", name(self.queries)),
            ("intrinsic rank", self.intrinsic_rank.to_string()),
            ("signal", self.signal.to_string()),
        ];
        if self.world == WorldKind::Items {
            facts.push(("items", self.items.to_string()));
            facts.push(("temperature", self.temperature.to_string()));
            facts.push(("misspecification", self.misspecification.to_string()));
        }
        facts
    }

    /// Draws the environment.
    pub fn draw(&self, dim: usize, models: usize, seed: u64) -> Box<dyn World> {
        let Self { intrinsic_rank, signal, items, temperature, misspecification, .. } = *self;
        let shape = match self.queries {
            ShapeKind::PowerLaw => Shape::PowerLaw,
            ShapeKind::Isotropic => Shape::Isotropic,
            ShapeKind::Clustered => Shape::Clustered,
        };
        match self.world {
            WorldKind::LogQuadratic => {
                Box::new(LogQuadratic::new(LogQuadraticSpec { dim, models, intrinsic_rank, signal, shape, seed }))
            }
            WorldKind::Items => Box::new(Items::new(ItemsSpec {
                dim,
                models,
                intrinsic_rank,
                items,
                temperature,
                misspecification,
                signal,
                shape,
                seed,
            })),
        }
    }
}

fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// Parses a whole number above 0.
pub fn positive(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&x| x > 0).ok_or_else(|| "must be a whole number, 1 or more".to_owned())
}

/// Largest dimension of a simulation.
const DIM_MAX: usize = 4096;

/// Parses the dimension of a simulation.
pub fn dimension(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|dim| (1..=DIM_MAX).contains(dim)).ok_or_else(|| {
        format!(
            "must be a whole number, 1 to {DIM_MAX}: learners decompose a matrix of dim x dim numbers, which takes minutes at \
             {DIM_MAX} and eight times as long for each doubling"
        )
    })
}

/// Parses a number from 1e-6 to 1e6.
pub fn positive_number(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|x| (1e-6..=1e6).contains(x)).ok_or_else(|| "must be a number from 1e-6 to 1e6".to_owned())
}

/// Parses a number from 0 to 10.
pub fn exponent(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|x| (0.0..=10.0).contains(x)).ok_or_else(|| "must be a number from 0 to 10".to_owned())
}

/// Parses a number from 0 to 1.
pub fn share(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|x| (0.0..=1.0).contains(x)).ok_or_else(|| "must be a number from 0 to 1".to_owned())
}
