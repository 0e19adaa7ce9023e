//! What is maximised: the reward, less what models cost.
//!
//! ```text
//! utility_m  = reward_m - sum_j weight_j x_mj - sum_j lambda_j x_mj           x_mj: outcome j of model m, such as its cost
//! score_m    = S (quality_m - sum_j weight_j x_mj) - phi sum_j price_j x_mj / budget_j          S: steepness of the scores
//! price_j   += (a (x_j / budget_j - 1) + a^2 / 4 debt_j) / V_j                at least 0; after every charged request
//! debt_j    += x_j / budget_j - 1                                             what was spent beyond the budget so far
//! ```
//!
//! The price is the multiplier of the budget: lambda_j = phi price_j / (S budget_j). Dual ascent moves it along the budget's violation.
//! Two things make that fast and exact. The step is Newton's: softmax spends V_j less per unit of the price, where V_j is the variance
//! of x_j / budget_j over the distribution that was played, so violations shrink by the same factor a per request
//! whatever the scale of the outcome. And the debt makes up for what was overspent: with a^2 / 4 its response is critically
//! damped. A request is charged when its decision is read, with the outcome that the event carries or with what its model is
//! expected to cost, and corrected when its outcome arrives: price and debt then move by the difference. Decisions were taken by parameters that are some requests old;
//! a is small enough to be stable with that delay.
//!
//! A budget that does not bind has the price 0 and saves nothing for later. The quality floor takes precedence over budgets: phi
//! falls below 1 while the predicted reward of what was played is more than `floor` below that of the best single model.
//!
//! Quality and outcomes are learned separately, so a changed budget, weight or price list needs no relearning.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::event::ModelName;
use crate::router::Outcomes;
use crate::wire::records::learner::objective::{FadingMeanRecord, FloorRecord, ObjectiveRecord, OutcomeRecord};

/// Checked settings of the objective. By default only the reward counts.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ObjectiveSpec {
    /// How far the predicted reward may fall below that of the best single model, on the scale of 0..1.
    pub floor: Option<f64>,
    /// In the order of their names.
    pub outcomes: Vec<OutcomeSpec>,
}

/// One outcome.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OutcomeSpec {
    /// Its name.
    pub name: String,
    /// Least and greatest value; others are clipped.
    pub range: (f64, f64),
    /// The reward that one unit is worth.
    pub weight: f64,
    /// The most that a request may cost on average.
    pub budget: Option<f64>,
    /// What models cost until an event says otherwise.
    pub models: BTreeMap<ModelName, f64>,
}

impl ObjectiveSpec {
    /// Whether only the reward counts.
    pub fn is_empty(&self) -> bool {
        self.outcomes.is_empty()
    }
}

/// The state of the objective of one learner.
#[derive(Debug, Clone, PartialEq)]
pub struct Objective {
    models: Vec<ModelName>,
    spec: ObjectiveSpec,
    outcomes: Vec<Outcome>,
    floor: QualityFloor,
    delay: Delay,
}

/// How old the parameters are that decide.
#[derive(Debug, Clone, Default, PartialEq)]
struct Delay {
    /// Examples learned by the last charge.
    examples: u64,
    examples_per_charge: FadingMean,
    /// In charges.
    age: FadingMean,
    /// a: the share of a violation that one request corrects.
    pace: f64,
}

#[derive(Debug, Clone, Default, PartialEq)]
struct Outcome {
    observed: Vec<FadingMean>,
    price: f64,
    debt: f64,
    variance: FadingMean,
    requests: u64,
    spent: f64,
    recent: FadingMean,
}

#[derive(Debug, Clone, Default, PartialEq)]
struct QualityFloor {
    /// 1 - phi
    relief: f64,
    played: FadingMean,
    alone: Vec<FadingMean>,
}

/// `sum / weight`, where older values fade.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct FadingMean {
    sum: f64,
    weight: f64,
}

/// A decision to charge.
#[derive(Debug, Clone, Copy)]
pub struct Charge<'a> {
    /// Index of the model.
    pub model: usize,
    /// The distribution that it was drawn from, if the log states it.
    pub played: Option<&'a [f64]>,
    /// The policy before an exploration floor or a control group was mixed in, if that is known.
    pub policy: Option<&'a [f64]>,
    /// Examples that were learned since the parameters that decided; `None` if others decided.
    pub age: Option<u64>,
    /// Examples learned so far.
    pub examples: u64,
    /// Whether the policy gets only a part of the traffic: the budget then holds for what the policy would spend.
    pub is_partial: bool,
}

/// What each model pays on one example.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Tolls {
    /// In units of the score, for budgets; empty if there are none.
    budgets: Vec<f64>,
    /// In units of the reward, for weights; empty if there are none.
    weights: Vec<f64>,
}

/// What is known of one outcome.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OutcomeView {
    /// Its name.
    pub name: String,
    /// The budget per request.
    pub budget: Option<f64>,
    /// The reward that one unit is worth by configuration.
    pub weight: f64,
    /// lambda: the reward that one unit of it is worth at present, so that the budget holds.
    pub lambda: f64,
    /// Requests charged.
    pub requests: u64,
    /// Mean per request, of all.
    pub mean: Option<f64>,
    /// Mean per request, of the latest.
    pub recent: Option<f64>,
    /// What is expected of each model.
    pub models: Vec<f64>,
}

/// What the objective does at present.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ObjectiveView {
    /// By outcome.
    pub outcomes: Vec<OutcomeView>,
    /// How far the reward may fall below that of the best single model.
    pub floor: Option<f64>,
    /// Share of the prices that the floor permits.
    pub permitted: f64,
    /// Predicted reward of each model alone, on the scale of 0..1; empty before the first example.
    pub quality: Vec<f64>,
    /// Predicted reward of what was played.
    pub played_quality: Option<f64>,
}

/// The largest share of a violation that one request corrects, and that times the age of the parameters.
const PACE_MAX: f64 = 0.02;
const PACE_TIMES_AGE: f64 = 0.2;

/// The least variance that a step divides by: where hardly anything is left to save, it must not leap.
const VARIANCE_MIN: f64 = 0.1;

/// The most that a single request counts as a violation, in budgets: its debt counts in full.
const VIOLATION_MAX: f64 = 5.0;

/// Bounds of a price, in units of the score per budget, and of the debt, in budgets.
const PRICE_MAX: f64 = 1000.0;
const DEBT_MAX: f64 = 1000.0;
const SAVINGS_MAX: f64 = 200.0;

/// What is left of observed outcomes of a model after another one, and after a request, whichever model answered. Below the
/// weight `FRESH` they count in part: a model that is not played is tried about every 2500 requests, lest its price changed.
const KEEP_OBSERVED: f64 = 1.0 - 1.0 / 64.0;
const KEEP_UNSEEN: f64 = 1.0 - 1.0 / 1000.0;
const FRESH: f64 = 0.5;

/// The least part that observations count. Many requests are decided before a try is observed: a model must not look cheap that
/// was far too dear.
const TRUSTED: f64 = 0.5;

/// What is left of variances and ages, and of recent spending.
const KEEP_VARIANCE: f64 = 1.0 - 1.0 / 256.0;
const KEEP_RECENT: f64 = 1.0 - 1.0 / 2000.0;

/// What is left of the rate of examples after a charge, and the least rate.
const KEEP_RATE: f64 = 1.0 - 1.0 / 1000.0;
const RATE_MIN: f64 = 1e-3;

/// What is left of predicted rewards after one example, and the most that phi changes by it.
const KEEP_QUALITY: f64 = 1.0 - 1.0 / 2000.0;
const RELIEF_STEP: f64 = 1.0 / 500.0;

/// The most that sums and counts can have become in any stream.
const SUM_MAX: f64 = 1e30;

impl FadingMean {
    fn add(&mut self, value: f64, keep: f64) {
        self.sum = keep * self.sum + value;
        self.weight = keep * self.weight + 1.0;
    }

    fn fade(&mut self, keep: f64) {
        self.sum *= keep;
        self.weight *= keep;
    }

    fn mean(self) -> Option<f64> {
        (self.weight > 0.0).then(|| self.sum / self.weight)
    }

    fn record(self) -> FadingMeanRecord {
        FadingMeanRecord { sum: self.sum, weight: self.weight }
    }

    fn from_record(record: FadingMeanRecord) -> Option<Self> {
        let FadingMeanRecord { sum, weight } = record;
        (sum.abs() <= SUM_MAX && (0.0..=SUM_MAX).contains(&weight)).then_some(Self { sum, weight })
    }
}

impl Objective {
    /// Nothing observed.
    pub fn new(spec: ObjectiveSpec, models: Vec<ModelName>) -> Self {
        let outcome = || Outcome { observed: vec![FadingMean::default(); models.len()], ..Outcome::default() };
        let outcomes = spec.outcomes.iter().map(|_| outcome()).collect();
        let floor = QualityFloor { alone: vec![FadingMean::default(); models.len()], ..QualityFloor::default() };
        Self { models, outcomes, floor, spec, delay: Delay::default() }
    }

    /// Whether only the reward counts.
    pub fn is_empty(&self) -> bool {
        self.spec.is_empty()
    }

    /// Number of decisions that were charged.
    pub fn charges(&self) -> u64 {
        self.outcomes.iter().map(|outcome| outcome.requests).max().unwrap_or_default()
    }

    /// Whether there is a floor on the quality.
    pub fn has_floor(&self) -> bool {
        self.spec.floor.is_some() && !self.is_empty()
    }

    /// What outcome `j` of a model is expected to be: as observed. Where observations are missing or have faded, as configured,
    /// else, in part, as little as of any other model. Such a model is tried: if it seemed dear forever, a lower price would stay unnoticed.
    fn expected(&self, j: usize, model: usize) -> f64 {
        let (spec, observed) = (&self.spec.outcomes[j], &self.outcomes[j].observed);
        let known = |m: usize| observed[m].mean().or_else(|| spec.models.get(&self.models[m]).copied());
        let configured = spec.models.get(&self.models[model]).copied();
        let least = || (0..self.models.len()).filter_map(known).min_by(f64::total_cmp).unwrap_or(spec.range.0);
        let share = (observed[model].weight / FRESH).clamp(TRUSTED, 1.0);
        match observed[model].mean() {
            Some(mean) if share == 1.0 => mean,
            Some(mean) => share * mean + (1.0 - share) * configured.unwrap_or_else(least),
            None => configured.unwrap_or_else(least),
        }
    }

    /// Charges a decision, with the outcomes that its event carries. Returns what was charged of each outcome.
    pub fn charge(&mut self, charge: Charge, known: &BTreeMap<String, f64>) -> Vec<(String, f64)> {
        let mut charged = Vec::with_capacity(self.outcomes.len());
        self.delay.note(&charge);
        let pace = self.delay.pace;
        for j in 0..self.outcomes.len() {
            let name = self.spec.outcomes[j].name.clone();
            self.outcomes[j].observed.iter_mut().for_each(|mean| mean.fade(KEEP_UNSEEN));
            if let Some(&value) = known.get(&name) {
                self.outcomes[j].observed[charge.model].add(value, KEEP_OBSERVED);
            }
            let amount = known.get(&name).copied().unwrap_or_else(|| self.expected(j, charge.model));
            self.steer(j, charge, pace, amount);
            let outcome = &mut self.outcomes[j];
            outcome.requests += 1;
            outcome.spent += amount;
            outcome.recent.add(amount, KEEP_RECENT);
            charged.push((name, amount));
        }
        charged
    }

    /// Moves the price of an outcome after a decision that cost `amount`.
    fn steer(&mut self, j: usize, charge: Charge, pace: f64, amount: f64) {
        let Some(budget) = self.spec.outcomes[j].budget else { return };
        // What others decide says nothing of the price.
        if charge.age.is_none() {
            return;
        }
        let costs = |p: &[f64]| {
            let cost = |(m, p): (usize, &f64)| (*p, self.expected(j, m) / budget);
            p.iter().enumerate().filter(|(_, p)| **p > 0.0).map(cost).collect::<Vec<(f64, f64)>>()
        };
        let mean = |costs: &[(f64, f64)]| costs.iter().map(|(p, x)| p * x).sum::<f64>();
        let played = if charge.is_partial { charge.policy } else { charge.played }.map(costs);
        let spent = match (&played, charge.is_partial) {
            (Some(costs), true) => mean(costs),
            _ => amount / budget,
        };
        let outcome = &mut self.outcomes[j];
        if let Some(costs) = played {
            let middle = mean(&costs);
            let variance = costs.iter().map(|(p, x)| p * (x - middle) * (x - middle)).sum();
            outcome.variance.add(variance, KEEP_VARIANCE);
        }
        outcome.owe(spent - 1.0);
        outcome.move_price(pace * (spent - 1.0).min(VIOLATION_MAX) + 0.25 * pace * pace * outcome.debt);
        if outcome.price == 0.0 {
            outcome.debt = outcome.debt.max(0.0);
        }
    }

    /// Corrects a charge by the outcomes that arrived with the feedback.
    pub fn settle(
        &mut self,
        model: usize,
        charged: &[(String, f64)],
        outcomes: &BTreeMap<String, f64>,
        is_partial: bool,
    ) {
        for (spec, outcome) in self.spec.outcomes.iter().zip(&mut self.outcomes) {
            let Some(&value) = outcomes.get(&spec.name) else { continue };
            outcome.observed[model].add(value, KEEP_OBSERVED);
            let Some((_, before)) = charged.iter().find(|(name, _)| *name == spec.name) else { continue };
            outcome.spent += value - before;
            // The mean per request takes the correction without counting the request again.
            outcome.recent.sum += value - before;
            if let Some(budget) = spec.budget.filter(|_| !is_partial) {
                let error = (value - before) / budget;
                outcome.owe(error);
                outcome.move_price(self.delay.pace * error.clamp(-VIOLATION_MAX, VIOLATION_MAX));
            }
        }
    }

    /// Takes the predicted rewards of an example into account, and the distribution that was played.
    pub fn note_quality(&mut self, predicted: &[f64], played: &[f64]) {
        let quality = &mut self.floor;
        quality.played.add(predicted.iter().zip(played).map(|(r, p)| r * p).sum(), KEEP_QUALITY);
        quality.alone.iter_mut().zip(predicted).for_each(|(mean, r)| mean.add(*r, KEEP_QUALITY));
        let Some(floor) = self.spec.floor else { return };
        let best = quality.alone.iter().filter_map(|mean| mean.mean()).fold(0.0, f64::max);
        let loss = best - quality.played.mean().unwrap_or(best);
        let excess = ((loss - floor) / floor).clamp(-1.0, 1.0);
        quality.relief = (quality.relief + RELIEF_STEP * excess).clamp(0.0, 1.0);
    }

    /// What each model pays at present.
    pub fn tolls(&self) -> Tolls {
        let mut tolls = Tolls::default();
        for (j, (spec, outcome)) in self.spec.outcomes.iter().zip(&self.outcomes).enumerate() {
            let add = |to: &mut Vec<f64>, price: f64| {
                to.resize(self.models.len(), 0.0);
                to.iter_mut().enumerate().for_each(|(m, toll)| *toll += price * self.expected(j, m));
            };
            if let Some(budget) = spec.budget {
                add(&mut tolls.budgets, (1.0 - self.floor.relief) * outcome.price / budget);
            }
            if spec.weight != 0.0 {
                add(&mut tolls.weights, spec.weight);
            }
        }
        tolls
    }

    /// What routers subtract from scores of this steepness.
    pub fn outcomes(&self, steepness: f64) -> Outcomes {
        let names = self.spec.outcomes.iter().map(|spec| spec.name.clone()).collect();
        let prices =
            (0..self.outcomes.len()).map(|j| self.price(j) + steepness * self.spec.outcomes[j].weight).collect();
        let of_model = |m| (0..self.outcomes.len()).map(move |j| self.expected(j, m) as f32);
        let expected = (0..self.models.len()).flat_map(of_model).collect();
        Outcomes::new(self.models.len(), names, prices, expected).unwrap_or_default()
    }

    /// What a unit of an outcome takes from a score to keep its budget.
    fn price(&self, j: usize) -> f64 {
        let budget = self.spec.outcomes[j].budget;
        budget.map_or(0.0, |budget| (1.0 - self.floor.relief) * self.outcomes[j].price / budget)
    }

    /// What it does at present, for scores of this steepness; `None` if only the reward counts.
    pub fn view(&self, steepness: f64) -> Option<ObjectiveView> {
        if self.is_empty() {
            return None;
        }
        let outcome = |(j, (spec, outcome)): (usize, (&OutcomeSpec, &Outcome))| OutcomeView {
            name: spec.name.clone(),
            budget: spec.budget,
            weight: spec.weight,
            lambda: self.price(j) / steepness,
            requests: outcome.requests,
            mean: (outcome.requests > 0).then(|| outcome.spent / outcome.requests as f64),
            recent: outcome.recent.mean(),
            models: (0..self.models.len()).map(|m| self.expected(j, m)).collect(),
        };
        Some(ObjectiveView {
            outcomes: self.spec.outcomes.iter().zip(&self.outcomes).enumerate().map(outcome).collect(),
            floor: self.spec.floor,
            permitted: 1.0 - self.floor.relief,
            quality: self.floor.alone.iter().filter_map(|mean| mean.mean()).collect(),
            played_quality: self.floor.played.mean(),
        })
    }

    /// The record of its state.
    pub fn record(&self) -> ObjectiveRecord {
        let record = |(spec, outcome): (&OutcomeSpec, &Outcome)| OutcomeRecord {
            name: spec.name.clone(),
            observed: outcome.observed.iter().map(|mean| mean.record()).collect(),
            price: outcome.price,
            debt: outcome.debt,
            variance: outcome.variance.record(),
            requests: outcome.requests,
            spent: outcome.spent,
            recent: outcome.recent.record(),
        };
        ObjectiveRecord {
            outcomes: self.spec.outcomes.iter().zip(&self.outcomes).map(record).collect(),
            floor: FloorRecord {
                relief: self.floor.relief,
                played: self.floor.played.record(),
                alone: self.floor.alone.iter().map(|mean| mean.record()).collect(),
            },
            examples: self.delay.examples,
            examples_per_charge: self.delay.examples_per_charge.record(),
            age: self.delay.age.record(),
            pace: self.delay.pace,
        }
    }

    /// Restores a record that was saved with these models. Outcomes are matched by name: new ones start empty, others are
    /// dropped. `None` if it holds impossible values.
    pub fn restore(spec: ObjectiveSpec, models: Vec<ModelName>, record: ObjectiveRecord) -> Option<Self> {
        let mut objective = Self::new(spec, models);
        let means = |records: Vec<FadingMeanRecord>| {
            (records.len() == objective.models.len()).then_some(())?;
            records.into_iter().map(FadingMean::from_record).collect::<Option<Vec<_>>>()
        };
        let mut saved = BTreeMap::new();
        for record in record.outcomes {
            let OutcomeRecord { name, observed, price, debt, variance, requests, spent, recent } = record;
            let is_sound = (0.0..=PRICE_MAX).contains(&price)
                && (-SAVINGS_MAX..=DEBT_MAX).contains(&debt)
                && spent.abs() <= SUM_MAX
                && requests < u64::MAX / 2;
            let outcome = Outcome {
                observed: means(observed)?,
                price,
                debt,
                variance: FadingMean::from_record(variance)?,
                requests,
                spent,
                recent: FadingMean::from_record(recent)?,
            };
            saved.insert(name, is_sound.then_some(outcome)?);
        }
        let FloorRecord { relief, played, alone } = record.floor;
        // Older learners have none.
        let alone = if alone.is_empty() { objective.floor.alone.clone() } else { means(alone)? };
        objective.floor = QualityFloor { relief, played: FadingMean::from_record(played)?, alone };
        objective.delay = Delay {
            examples: record.examples,
            examples_per_charge: FadingMean::from_record(record.examples_per_charge)?,
            age: FadingMean::from_record(record.age)?,
            pace: Some(record.pace).filter(|pace| (0.0..=PACE_MAX).contains(pace))?,
        };
        for (spec, outcome) in objective.spec.outcomes.iter().zip(&mut objective.outcomes) {
            saved.remove(&spec.name).into_iter().for_each(|saved| *outcome = saved);
        }
        (0.0..=1.0).contains(&relief).then_some(objective)
    }

    /// Moves to another set of models: `places` has the old index of each, or none if it is new.
    pub fn remap(&mut self, models: Vec<ModelName>, places: &[Option<usize>]) {
        let moved = |means: &[FadingMean]| {
            places.iter().map(|place| place.map_or_else(FadingMean::default, |old| means[old])).collect::<Vec<_>>()
        };
        self.outcomes.iter_mut().for_each(|outcome| outcome.observed = moved(&outcome.observed));
        self.floor.alone = moved(&self.floor.alone);
        self.models = models;
    }
}

impl Delay {
    fn note(&mut self, charge: &Charge) {
        // What was learned before the first charge is no rate.
        let is_first = self.examples_per_charge.weight == 0.0;
        let learned = if is_first { 1 } else { charge.examples.saturating_sub(self.examples) };
        self.examples = charge.examples;
        self.examples_per_charge.add(learned as f64, KEEP_RATE);
        let rate = self.examples_per_charge.mean().unwrap_or(1.0).max(RATE_MIN);
        // Decisions of others have no age.
        let Some(age) = charge.age.map(|age| age as f64 / rate) else { return };
        self.age.add(age, KEEP_VARIANCE);
        self.pace = PACE_MAX.min(PACE_TIMES_AGE / (1.0 + age.max(self.age.mean().unwrap_or(0.0))));
    }
}

impl Outcome {
    /// Moves the price so that spending falls by so many budgets.
    fn move_price(&mut self, budgets: f64) {
        let variance = self.variance.mean().unwrap_or(1.0).max(VARIANCE_MIN);
        self.price = (self.price + budgets / variance).clamp(0.0, PRICE_MAX);
    }

    fn owe(&mut self, budgets: f64) {
        self.debt = (self.debt + budgets).clamp(-SAVINGS_MAX, DEBT_MAX);
    }
}

impl Tolls {
    /// Whether no model pays.
    pub fn is_empty(&self) -> bool {
        self.budgets.is_empty() && self.weights.is_empty()
    }

    /// What each model pays in units of scores of this steepness; empty if no model pays.
    pub fn in_scores(&self, steepness: f64) -> Vec<f64> {
        let models = self.budgets.len().max(self.weights.len());
        let of = |tolls: &[f64], m: usize| tolls.get(m).copied().unwrap_or(0.0);
        (0..models).map(|m| of(&self.budgets, m) + steepness * of(&self.weights, m)).collect()
    }
}

/// What rewards are worth after tolls, scaled to 0..1.
#[derive(Debug, Clone, Copy)]
pub struct Utility<'a> {
    /// In units of the score.
    tolls: &'a [f64],
    steepness: f64,
    most: f64,
    spread: f64,
}

impl<'a> Utility<'a> {
    /// For these tolls, in units of scores of this steepness; empty if no model pays.
    pub fn new(tolls: &'a [f64], steepness: f64) -> Self {
        let most = tolls.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let least = tolls.iter().copied().fold(f64::INFINITY, f64::min);
        let spread = if tolls.is_empty() { 0.0 } else { (most - least) / steepness };
        Self { tolls, steepness, most, spread }
    }

    /// (reward - toll, less that of the most expensive model) / (1 + the spread of the tolls)
    pub fn of(&self, model: usize, reward: f64) -> f64 {
        let saved = self.tolls.get(model).map_or(0.0, |toll| (self.most - toll) / self.steepness);
        (reward + saved) / (1.0 + self.spread)
    }
}

/// Subtracts what models pay from their scores.
pub fn pay(scores: &mut [f64], tolls: &[f64]) {
    scores.iter_mut().zip(tolls).for_each(|(score, toll)| *score -= toll);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::router::Sampling;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    fn models() -> Vec<ModelName> {
        ["a", "b", "c"].map(|name| ModelName::try_from(name).unwrap()).to_vec()
    }

    fn spec(budget: Option<f64>, weight: f64, floor: Option<f64>) -> ObjectiveSpec {
        let prices = models().into_iter().zip([0.1, 1.0, 4.0]).collect();
        let cost = OutcomeSpec { name: "cost".to_owned(), range: (0.0, 100.0), weight, budget, models: prices };
        ObjectiveSpec { floor, outcomes: vec![cost] }
    }

    /// Plays softmax of `quality` less tolls, with parameters of a given age; what each request cost.
    fn play(objective: &mut Objective, quality: [f64; 3], requests: usize, age: usize, prices: [f64; 3]) -> Vec<f64> {
        let mut random = ChaCha8Rng::seed_from_u64(11);
        let mut published = std::collections::VecDeque::from([objective.tolls()]);
        let mut spent = Vec::new();
        for _ in 0..requests {
            let mut p = quality;
            pay(&mut p, &published[0].in_scores(1.0));
            Sampling::Softmax.turn(&mut p);
            let u = random.random::<f64>();
            let model = usize::from(u >= p[0]) + usize::from(u >= p[0] + p[1]);
            let charge = Charge {
                model,
                played: Some(&p),
                policy: None,
                age: Some(published.len() as u64 - 1),
                examples: objective.charges(),
                is_partial: false,
            };
            let known = BTreeMap::from([("cost".to_owned(), prices[model])]);
            spent.push(objective.charge(charge, &known)[0].1);
            published.push_back(objective.tolls());
            if published.len() > age + 1 {
                published.pop_front();
            }
        }
        spent
    }

    fn mean(x: &[f64]) -> f64 {
        x.iter().sum::<f64>() / x.len() as f64
    }

    #[test]
    fn a_budget_holds_over_every_stretch() {
        // What is left is the chance of the draws before a correction takes effect.
        for (age, most) in [(0, 0.005), (50, 0.01), (200, 0.02), (1000, 0.05)] {
            let mut objective = Objective::new(spec(Some(1.0), 0.0, None), models());
            let spent = play(&mut objective, [0.0, 1.0, 3.0], 40_000, age, [0.1, 1.0, 4.0]);
            let worst = spent[5000..].windows(10_000).step_by(100).map(|w| (mean(w) - 1.0).abs()).fold(0.0, f64::max);
            assert!(worst < most, "{age}: {worst}");
        }
    }

    #[test]
    fn a_budget_holds_through_a_change_of_prices_and_is_free_where_it_does_not_bind() {
        let mut objective = Objective::new(spec(Some(1.0), 0.0, None), models());
        play(&mut objective, [0.0, 1.0, 3.0], 10_000, 50, [0.1, 1.0, 4.0]);
        let spent = play(&mut objective, [0.0, 1.0, 3.0], 10_000, 50, [0.1, 3.0, 1.5]);
        assert!((mean(&spent) - 1.0).abs() < 0.01, "{}", mean(&spent));
        let spent = play(&mut objective, [0.0, 1.0, 3.0], 10_000, 50, [0.1, 0.2, 0.3]);
        assert!(mean(&spent[5000..]) < 0.3 && objective.outcomes[0].price == 0.0);
        // Nothing was saved up meanwhile.
        let spent = play(&mut objective, [0.0, 1.0, 3.0], 10_000, 50, [0.1, 1.0, 4.0]);
        assert!((mean(&spent) - 1.0).abs() < 0.03, "{}", mean(&spent));
    }

    #[test]
    fn charges_are_corrected_by_what_arrives() {
        let mut objective = Objective::new(spec(Some(1.0), 0.0, None), models());
        let charge = Charge { model: 1, played: None, policy: None, age: Some(0), examples: 0, is_partial: false };
        let charged = objective.charge(charge, &BTreeMap::new());
        assert_eq!(charged, [("cost".to_owned(), 1.0)]);
        let late = BTreeMap::from([("cost".to_owned(), 3.0)]);
        objective.settle(1, &charged, &late, false);
        assert_eq!((objective.outcomes[0].spent, objective.outcomes[0].debt), (3.0, 2.0));
        assert_eq!(objective.expected(0, 1), 3.0, "observed");
        assert_eq!(objective.expected(0, 2), 4.0, "configured");
        assert_eq!(objective.view(2.0).unwrap().outcomes[0].mean, Some(3.0));
    }

    #[test]
    fn weights_are_worth_reward_and_budgets_are_worth_scores() {
        let objective = Objective::new(spec(None, 0.5, None), models());
        assert_eq!(objective.tolls().in_scores(10.0), [0.5, 5.0, 20.0]);
        let outcomes = objective.outcomes(10.0);
        let mut scores = [0.0; 3];
        outcomes.charge(&mut scores);
        let expected = [0.5, 5.0, 20.0];
        assert!(scores.iter().zip(expected).all(|(a, b)| (a + b).abs() < 1e-6), "{scores:?}");
    }

    #[test]
    fn utilities_are_rewards_less_tolls_on_a_scale_of_0_to_1() {
        let none = Utility::new(&[], 5.0);
        assert_eq!((none.of(0, 0.25), none.of(7, 1.0)), (0.25, 1.0));
        let utility = Utility::new(&[0.0, 5.0, 10.0], 10.0);
        assert_eq!((utility.of(0, 1.0), utility.of(2, 0.0)), (1.0, 0.0));
        let difference = utility.of(1, 0.7) - utility.of(0, 0.7);
        assert!((difference + 0.5 / 2.0).abs() < 1e-12, "half a reward, on a scale twice as long");
    }

    #[test]
    fn the_floor_takes_precedence_over_the_budget() {
        let mut objective = Objective::new(spec(Some(0.2), 0.0, Some(0.05)), models());
        play(&mut objective, [0.0, 1.0, 3.0], 3000, 0, [0.1, 1.0, 4.0]);
        let before = objective.tolls().in_scores(1.0)[2];
        for _ in 0..200 {
            objective.note_quality(&[0.2, 0.3, 0.9], &[0.9, 0.1, 0.0]);
        }
        assert!(objective.tolls().in_scores(1.0)[2] < 0.7 * before);
        for _ in 0..20_000 {
            objective.note_quality(&[0.2, 0.3, 0.9], &[0.0, 0.0, 1.0]);
        }
        assert_eq!(objective.tolls().in_scores(1.0)[2], before);
    }

    #[test]
    fn a_record_restores_the_same_state_or_is_refused() {
        let same = spec(Some(1.0), 0.1, Some(0.02));
        let mut objective = Objective::new(same.clone(), models());
        play(&mut objective, [0.0, 1.0, 3.0], 100, 3, [0.1, 1.0, 4.0]);
        objective.note_quality(&[0.2, 0.3, 0.9], &[0.9, 0.1, 0.0]);
        assert_eq!(Objective::restore(same.clone(), models(), objective.record()), Some(objective.clone()));
        let damages: [fn(&mut ObjectiveRecord); 5] = [
            |record| record.outcomes[0].price = -1.0,
            |record| record.outcomes[0].debt = f64::NAN,
            |record| record.outcomes[0].observed.truncate(1),
            |record| record.floor.relief = 2.0,
            |record| record.outcomes[0].variance.weight = -1.0,
        ];
        for (i, damage) in damages.into_iter().enumerate() {
            let mut damaged = objective.record();
            damage(&mut damaged);
            assert_eq!(Objective::restore(same.clone(), models(), damaged), None, "{i}");
        }
        let other = Objective::restore(ObjectiveSpec::default(), models(), objective.record()).unwrap();
        assert!(other.is_empty() && other.tolls().is_empty() && other.view(1.0).is_none());
        let mut fewer = objective.clone();
        fewer.remap(models()[1..].to_vec(), &[Some(1), Some(2)]);
        assert_eq!(fewer.expected(0, 0), objective.expected(0, 1));
    }
}
