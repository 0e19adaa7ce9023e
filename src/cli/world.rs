//! Options that describe a simulated world.

use clap::ValueEnum;

use crate::simulate::World;
use crate::simulate::items::{Items, ItemsSpec};
use crate::simulate::log_quadratic::{LogQuadratic, LogQuadraticSpec};
use crate::simulate::queries::Shape;

/// Options of every command that simulates.
#[derive(Debug, clap::Args)]
pub struct WorldArgs {
    /// What the models are good at
    #[arg(long, value_enum, default_value_t = WorldKind::LogQuadratic)]
    pub world: WorldKind,
    /// How queries are spread over directions
    #[arg(long, value_enum, default_value_t = ShapeKind::PowerLaw)]
    pub queries: ShapeKind,
    /// The paper's s: the rank of the models' kernels
    #[arg(long, default_value_t = 2, value_parser = positive)]
    pub intrinsic_rank: usize,
    /// Standard deviation of expected rewards over queries and models, before they are clipped to 0..1
    #[arg(long, default_value_t = 0.3, value_parser = positive_number)]
    pub signal: f64,
    /// Number of items (--world items)
    #[arg(long, default_value_t = 100, value_parser = positive)]
    pub items: usize,
    /// Temperature of the models' recommendations (--world items)
    #[arg(long, default_value_t = 0.05, value_parser = positive_number)]
    pub temperature: f64,
    /// Bound of what the kernels leave unexplained (--world items)
    #[arg(long, default_value_t = 0.05, value_parser = share)]
    pub misspecification: f64,
}

/// What the models are good at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WorldKind {
    /// Expected reward 0.5 + q'Wq, clipped: the policy class fits exactly
    LogQuadratic,
    /// The paper's: models recommend items, items earn rewards
    Items,
}

/// How queries are spread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ShapeKind {
    /// Amplitude of direction j falls as 1/j: few directions matter, as in real embeddings
    PowerLaw,
    /// All directions alike
    Isotropic,
    /// Around topics
    Clustered,
}

impl WorldArgs {
    /// What the world is, in words.
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

    /// Draws the world.
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

/// A whole number above 0.
pub fn positive(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&x| x > 0).ok_or_else(|| "must be a whole number above 0".to_owned())
}

/// A number above 0, within reason.
pub fn positive_number(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|x| (1e-6..=1e6).contains(x)).ok_or_else(|| "must be a number from 1e-6 to 1e6".to_owned())
}

/// A number from 0 to 1.
pub fn share(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|x| (0.0..=1.0).contains(x)).ok_or_else(|| "must be a number from 0 to 1".to_owned())
}
