//! Policies evaluated on the same log: the logged policy, fixed parameters, algorithms that learn as they go, uniform, and
//! every single model.

use anyhow::anyhow;

use super::contestants::Contestant;
use crate::config::{Algorithm, LearnerConfig, Spec};
use crate::eligible::Eligible;
use crate::evaluate::judge::{Estimate, Judge, Logged, Range};
use crate::evaluate::sample_ratio::{SampleRatio, SampleRatioView};
use crate::evaluate::verdict::{Assessments, Names};
use crate::event::{Example, ModelName};
use crate::learner::Trainer;
use crate::router::{Params, uniform};

/// The evaluated policies, and the reward predictor of the doubly robust estimate.
pub struct Panel {
    models: Vec<ModelName>,
    /// Names of the policies that are not single models.
    candidates: Vec<String>,
    policies: Vec<Judged>,
    /// Names of the constant policies.
    alone: Vec<String>,
    predictor: Trainer,
    judge: Judge,
    ratio: SampleRatio,
    curve: Curve,
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
        let mut members = vec![("logged policy".to_owned(), Judged::Logged)];
        for (name, params) in params {
            if params.dim != spec.dim {
                return Err(anyhow!(
                    "{name} has dim = {}, but learner.dim = {}: use the configuration that the parameters were learned with",
                    params.dim,
                    spec.dim
                ));
            }
            let places = models.iter().map(|model| params.models.iter().position(|other| other == model)).collect();
            members.push((name, Judged::Params { params: Box::new(params), places }));
        }
        let learner = |Contestant { name, spec }| (name, Judged::Learner(Box::new(Trainer::new(spec))));
        members.extend(contestants.into_iter().map(learner));
        members.push(("uniform".to_owned(), Judged::Uniform));
        let alone = models.iter().map(|model| format!("always {model}")).collect();
        let names = models.iter().map(ToString::to_string).collect();
        let algorithm = Algorithm::HypentropyRegression;
        let predictor = LearnerConfig { dim: spec.dim, models: names, algorithm, ..LearnerConfig::default() };
        let judge = Judge::new(models.len(), members.len(), window);
        let ratio = SampleRatio::new(models.len());
        let predictor = Trainer::new(predictor.check()?);
        let (candidates, policies) = members.into_iter().unzip();
        Ok(Self { models, candidates, policies, alone, predictor, judge, ratio, curve: Curve::default() })
    }

    /// Evaluates an example under the current policies, then lets the learners learn from it.
    pub fn see(&mut self, example: &Example, alpha: f64) -> anyhow::Result<()> {
        let predicted = self.predictor.predicted_rewards(example.query())?;
        let mut played = Vec::with_capacity(self.policies.len());
        for policy in &self.policies {
            played.push(policy.play(example, self.models.len())?);
        }
        if example.has_stated_propensities() {
            self.ratio.see(example.propensities(), example.model());
        }
        let Some(reward) = example.reward() else { return self.learn(example) };
        let event = Logged {
            propensities: example.propensities(),
            model: example.model(),
            reward,
            predicted: &predicted,
            eligible: example.eligible(),
        };
        let played: Vec<&[f64]> = played.iter().map(Vec::as_slice).collect();
        self.judge.see(&event, &played);
        if self.curve.is_due(self.judge.events()) {
            let lifts = self.assessments(alpha).map_or_else(Vec::new, |assessed| {
                assessed
                    .all
                    .lifts
                    .iter()
                    .map(|lift| lift.over_any.map(|range| (range.nearest(lift.value), range)))
                    .collect()
            });
            self.curve.push(self.judge.events(), lifts);
        }
        self.learn(example)
    }

    fn learn(&mut self, example: &Example) -> anyhow::Result<()> {
        for policy in &mut self.policies {
            if let Judged::Learner(trainer) = policy {
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
        let members = self.candidates.iter().map(|name| (name, false));
        let names = members.chain(self.alone.iter().map(|name| (name, true)));
        names.zip(estimates).map(|((name, is_constant), estimate)| Row { name, estimate, is_constant }).collect()
    }

    /// Estimates over the most recent examples, and the number of these.
    pub fn latest(&self) -> (Vec<Estimate>, u64) {
        self.judge.latest()
    }

    /// Names of the policies.
    pub fn names(&self) -> Names<'_> {
        Names { candidates: &self.candidates, models: &self.models }
    }

    /// What the examples say about every policy; none if there are none. All ranges of a kind hold together with probability
    /// 1 - `alpha`.
    pub fn assessments(&self, alpha: f64) -> Option<Assessments> {
        Assessments::of(&self.judge, &self.ratio, &self.names(), alpha)
    }

    /// Whether models were played as often as the propensities say.
    pub fn sample_ratio(&self, alpha: f64) -> SampleRatioView {
        self.ratio.view(&self.models, alpha)
    }

    /// The lifts over time.
    pub fn curve(&self) -> &[Moment] {
        &self.curve.points
    }
}

impl Judged {
    /// The distribution that it would have sampled from.
    fn play(&self, example: &Example, models: usize) -> anyhow::Result<Vec<f64>> {
        Ok(match self {
            Self::Logged => example.propensities().to_vec(),
            Self::Params { params, places } => {
                let may =
                    |(m, place): (usize, &Option<usize>)| place.map(|place| (place, example.eligible().allows(m)));
                let mut mask = vec![false; params.models.len()];
                places.iter().enumerate().filter_map(may).for_each(|(place, may)| mask[place] = may);
                match Eligible::only(mask) {
                    Some(eligible) => {
                        let played = params.distribution_among(example.query(), &eligible)?.propensities;
                        places.iter().map(|place| place.map_or(0.0, |place| played[place])).collect()
                    }
                    // Nothing that it knows could answer.
                    None => conditioned_uniform(example, models),
                }
            }
            Self::Learner(trainer) => trainer.distribution_among(example.query(), example.eligible())?.propensities,
            Self::Uniform => conditioned_uniform(example, models),
        })
    }
}

/// All models alike that could answer.
fn conditioned_uniform(example: &Example, models: usize) -> Vec<f64> {
    let mut all = uniform(models);
    example.eligible().restrict(&mut all);
    all
}

/// The lifts of all candidates by number of examples, in at most twice [`POINTS`] points.
#[derive(Default)]
struct Curve {
    stride: u64,
    points: Vec<Moment>,
}

/// The lifts after some examples.
pub struct Moment {
    /// Number of examples.
    pub examples: u64,
    /// The lift of each candidate and its range, where it has one.
    pub lifts: Vec<Option<(f64, Range)>>,
}

const POINTS: usize = 100;

impl Curve {
    fn is_due(&self, examples: u64) -> bool {
        examples.is_multiple_of(self.stride.max(1))
    }

    fn push(&mut self, examples: u64, lifts: Vec<Option<(f64, Range)>>) {
        self.stride = self.stride.max(1);
        self.points.push(Moment { examples, lifts });
        if self.points.len() >= 2 * POINTS {
            self.stride *= 2;
            let stride = self.stride;
            self.points.retain(|moment| moment.examples.is_multiple_of(stride));
        }
    }
}
