//! Policies evaluated on the same log: the logged policy, fixed parameters, algorithms that learn as they go, uniform, and
//! every single model.

use anyhow::anyhow;

use super::contestants::Contestant;
use crate::config::{Algorithm, LearnerConfig, Spec};
use crate::evaluate::judge::{Estimate, Judge, Logged, Range};
use crate::event::{Example, ModelName};
use crate::learner::Trainer;
use crate::router::{Params, uniform};

/// The evaluated policies, and the reward predictor of the doubly robust estimate.
pub struct Panel {
    models: Vec<ModelName>,
    members: Vec<Member>,
    /// Names of the constant policies.
    alone: Vec<String>,
    predictor: Trainer,
    judge: Judge,
    curve: Curve,
}

struct Member {
    name: String,
    policy: Judged,
}

enum Judged {
    Logged,
    Params { params: Box<Params>, places: Vec<Option<usize>> },
    Learner(Box<Trainer>),
    Uniform,
}

/// One evaluated policy.
pub struct Row<'a> {
    /// Its name.
    pub name: &'a str,
    /// Estimate of its value.
    pub estimate: &'a Estimate,
    /// Whether it always plays one model.
    pub is_constant: bool,
}

impl Panel {
    /// Evaluates these policies and the standard ones, on events of a space with this spec.
    pub fn new(
        spec: &Spec,
        params: Vec<(String, Params)>,
        contestants: Vec<Contestant>,
        window: u64,
    ) -> anyhow::Result<Self> {
        let models = spec.models.clone();
        let mut members = vec![Member { name: "logged policy".to_owned(), policy: Judged::Logged }];
        for (name, params) in params {
            if params.dim != spec.dim {
                return Err(anyhow!(
                    "{name} has dim = {}, but learner.dim = {}: use the configuration that the parameters were learned with",
                    params.dim,
                    spec.dim
                ));
            }
            let places = models.iter().map(|model| params.models.iter().position(|other| other == model)).collect();
            members.push(Member { name, policy: Judged::Params { params: Box::new(params), places } });
        }
        let learners = contestants.into_iter().map(|Contestant { name, spec }| (name, Trainer::new(spec)));
        members.extend(learners.map(|(name, trainer)| Member { name, policy: Judged::Learner(Box::new(trainer)) }));
        members.push(Member { name: "uniform".to_owned(), policy: Judged::Uniform });
        let alone = models.iter().map(|model| format!("always {model}")).collect();
        let names = models.iter().map(ToString::to_string).collect();
        let algorithm = Algorithm::HypentropyRegression;
        let predictor = LearnerConfig { dim: spec.dim, models: names, algorithm, ..LearnerConfig::default() };
        let judge = Judge::new(models.len(), members.len(), window);
        Ok(Self { models, members, alone, predictor: Trainer::new(predictor.check()?), judge, curve: Curve::default() })
    }

    /// Evaluates an example under the current policies, then lets the learners learn from it.
    pub fn see(&mut self, example: &Example, alpha: f64) -> anyhow::Result<()> {
        let predicted = self.predictor.predicted_rewards(example.query())?;
        let mut played = Vec::with_capacity(self.members.len());
        for member in &self.members {
            played.push(member.policy.play(example, self.models.len())?);
        }
        let event = Logged {
            propensities: example.propensities(),
            model: example.model(),
            reward: example.reward(),
            predicted: &predicted,
        };
        let played: Vec<&[f64]> = played.iter().map(Vec::as_slice).collect();
        self.judge.see(&event, &played, None);
        self.curve.see(&self.judge, alpha);
        for member in &mut self.members {
            if let Judged::Learner(trainer) = &mut member.policy {
                trainer.learn(example.clone())?;
            }
        }
        self.predictor.learn(example.clone())?;
        Ok(())
    }

    /// Over all examples.
    pub fn rows(&self) -> Vec<Row<'_>> {
        self.rows_of(self.judge.all())
    }

    /// Over the most recent examples, with these estimates.
    pub fn rows_of<'a>(&'a self, estimates: &'a [Estimate]) -> Vec<Row<'a>> {
        let members = self.members.iter().map(|member| (&member.name, false));
        let names = members.chain(self.alone.iter().map(|name| (name, true)));
        names.zip(estimates).map(|((name, is_constant), estimate)| Row { name, estimate, is_constant }).collect()
    }

    /// Estimates over the most recent examples, and the number of these.
    pub fn latest(&self) -> (Vec<Estimate>, u64) {
        self.judge.latest()
    }

    /// Error probability of the ranges over the most recent examples.
    pub fn latest_alpha(&self, alpha: f64) -> f64 {
        self.judge.latest_alpha(alpha)
    }

    /// Number of examples evaluated.
    pub fn examples(&self) -> u64 {
        self.judge.events()
    }

    /// The lift of the logged policy over time.
    pub fn curve(&self) -> &[(u64, Range)] {
        &self.curve.points
    }
}

impl Judged {
    /// The distribution that it would have sampled from.
    fn play(&self, example: &Example, models: usize) -> anyhow::Result<Vec<f64>> {
        Ok(match self {
            Self::Logged => example.propensities().to_vec(),
            Self::Params { params, places } => {
                let played = params.distribution(example.query())?.propensities;
                places.iter().map(|place| place.map_or(0.0, |place| played[place])).collect()
            }
            Self::Learner(trainer) => trainer.distribution(example.query())?.propensities,
            Self::Uniform => uniform(models),
        })
    }
}

/// The lift of the first policy by number of examples, in at most twice [`POINTS`] points.
#[derive(Default)]
struct Curve {
    stride: u64,
    points: Vec<(u64, Range)>,
}

const POINTS: usize = 100;

impl Curve {
    fn see(&mut self, judge: &Judge, alpha: f64) {
        self.stride = self.stride.max(1);
        if !judge.events().is_multiple_of(self.stride) {
            return;
        }
        if let Some(estimate) = judge.all().first() {
            self.points.push((judge.events(), estimate.lift_range(alpha)));
        }
        if self.points.len() >= 2 * POINTS {
            self.stride *= 2;
            let stride = self.stride;
            self.points.retain(|(events, _)| events.is_multiple_of(stride));
        }
    }
}
