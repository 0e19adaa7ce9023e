//! The sub-optimality gap of policy classes: the paper's table, and whether it says anything.
//!
//! ```text
//! gap(pi) = mean_q [ max_m R_m(q) - sum_m pi(m | q) R_m(q) ]                       (paper, Section 4)
//! ```
//!
//! The paper optimises and evaluates each class on the same queries. With as many dimensions as queries any rewards can be
//! fitted so, random ones too. Therefore each gap is taken three times: in sample, as in the paper; with the rewards
//! shuffled across queries, where there is nothing to learn beyond the best constant model, in sample too; and on
//! held-out queries, by cross-validation. There the ascent is stopped where a fifth of the training queries says, and
//! done again on all of them; the best constant model is that of the training queries.

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::classes::{Class, ClassPolicy, Problem, STEPS};
use crate::simulate::dataset::shuffle;

/// What is asked: the classes' gaps on each of some groups of queries.
#[derive(Debug, Clone)]
pub struct Study {
    groups: Vec<Group>,
    classes: [Class; 2],
    folds: usize,
    seed: u64,
}

/// Queries that are looked at on their own.
#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    /// What the row is called.
    pub name: String,
    /// The queries.
    pub problem: Problem,
}

/// A piece of the work, which depends on no other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Job {
    group: usize,
    class: usize,
    part: Part,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    InSample,
    Shuffled,
    /// Held out is the fold of this number.
    Fold(usize),
}

/// What came of a job: mean reward on each query, of a fold on each query of the fold.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    job: Job,
    earned: Vec<f64>,
}

/// A group's gaps.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// The group.
    pub name: String,
    /// How many queries it has.
    pub queries: usize,
    /// Always the same model.
    pub constant: Gaps,
    /// The log-linear class.
    pub log_linear: Gaps,
    /// The log-quadratic class.
    pub log_quadratic: Gaps,
}

/// The gap of one class.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Gaps {
    /// Optimised and measured on the same queries.
    pub in_sample: f64,
    /// Optimised on some, measured on others.
    pub held_out: f64,
    /// What is earned more than by the best constant model on held-out queries.
    pub held_out_gain: f64,
    /// Standard error of that gain over queries.
    pub held_out_error: f64,
    /// In sample, with the rewards shuffled across queries.
    pub shuffled: f64,
}

/// Steps that a job is reckoned to take; it may take fewer or more.
const NOMINAL_STEPS: u64 = 2 * STEPS as u64;

impl Study {
    /// Each group must have at least two queries for each of at least two folds.
    pub fn new(groups: Vec<Group>, rank: usize, folds: usize, seed: u64) -> Self {
        Self { groups, classes: [Class::LogLinear, Class::LogQuadratic { rank }], folds: folds.max(2), seed }
    }

    /// All the work, the large pieces first.
    pub fn jobs(&self) -> Vec<Job> {
        let parts: Vec<Part> =
            [Part::InSample, Part::Shuffled].into_iter().chain((0..self.folds).map(Part::Fold)).collect();
        let of = |group, class| parts.iter().map(move |&part| Job { group, class, part });
        let classes = |group| (0..self.classes.len()).rev().flat_map(move |class| of(group, class));
        (0..self.groups.len()).flat_map(classes).collect()
    }

    /// How long a job takes, in units that all jobs share.
    pub fn units(&self, job: Job) -> u64 {
        self.step_units(job) * NOMINAL_STEPS
    }

    /// Does a job; `tick` is told the units of each step, never more than the job has.
    pub fn run(&self, job: Job, tick: impl Fn(u64)) -> Outcome {
        let (step, mut left) = (self.step_units(job), self.units(job));
        let mut count = || {
            let units = step.min(left);
            left -= units;
            tick(units);
        };
        let (problem, class) = (&self.groups[job.group].problem, self.classes[job.class]);
        let earned = match job.part {
            Part::InSample => class.fit(problem, self.seed, &mut count).values(problem),
            Part::Shuffled => {
                let shuffled = problem.with_rewards_of(&self.order(problem.len(), 2));
                class.fit(&shuffled, self.seed, &mut count).values(&shuffled)
            }
            Part::Fold(fold) => {
                let (train, held_out) = self.split(problem.len(), fold);
                self.fit_for_others(class, problem, &train, &mut count).values(&problem.pick(&held_out))
            }
        };
        tick(left);
        Outcome { job, earned }
    }

    /// The rows, from what came of all jobs.
    pub fn rows(&self, outcomes: &[Outcome]) -> Vec<Row> {
        let row = |(i, group): (usize, &Group)| {
            let gaps =
                |class| self.gaps(&group.problem, outcomes.iter().filter(|o| o.job.group == i && o.job.class == class));
            let problem = &group.problem;
            let in_sample = problem.gap(problem.column(problem.best_constant()));
            let held_out = problem.gap(self.held_out_constant(problem).into_iter());
            // Shuffling changes no model's mean, and not the oracle's.
            let constant = Gaps { in_sample, held_out, held_out_gain: 0.0, held_out_error: 0.0, shuffled: in_sample };
            Row {
                name: group.name.clone(),
                queries: problem.len(),
                constant,
                log_linear: gaps(0),
                log_quadratic: gaps(1),
            }
        };
        self.groups.iter().enumerate().map(row).collect()
    }

    fn gaps<'a>(&self, problem: &Problem, outcomes: impl Iterator<Item = &'a Outcome>) -> Gaps {
        let (mut in_sample, mut shuffled) = (f64::NAN, f64::NAN);
        let mut held_out = vec![f64::NAN; problem.len()];
        for Outcome { job, earned } in outcomes {
            match job.part {
                Part::InSample => in_sample = problem.gap(earned.iter().copied()).max(0.0),
                Part::Shuffled => {
                    // Means over the same set of rows: the order does not matter.
                    let missed = problem.oracle().sum::<f64>() - earned.iter().sum::<f64>();
                    shuffled = missed.max(0.0) / problem.len() as f64;
                }
                Part::Fold(fold) => {
                    let (_, rows) = self.split(problem.len(), fold);
                    rows.into_iter().zip(earned).for_each(|(row, &earned)| held_out[row] = earned);
                }
            }
        }
        let gains: Vec<f64> = held_out.iter().zip(self.held_out_constant(problem)).map(|(own, c)| own - c).collect();
        let (held_out_gain, held_out_error) = mean_and_error(&gains);
        Gaps { in_sample, held_out: problem.gap(held_out.into_iter()), held_out_gain, held_out_error, shuffled }
    }

    /// What the best constant model of the training queries earns on each held-out one.
    fn held_out_constant(&self, problem: &Problem) -> Vec<f64> {
        let mut earned = vec![0.0; problem.len()];
        for fold in 0..self.folds {
            let (train, held_out) = self.split(problem.len(), fold);
            let model = problem.pick(&train).best_constant();
            let rewards: Vec<f64> = problem.column(model).collect();
            held_out.into_iter().for_each(|row| earned[row] = rewards[row]);
        }
        earned
    }

    fn fit_for_others(&self, class: Class, problem: &Problem, train: &[usize], mut tick: impl FnMut()) -> ClassPolicy {
        let (asked, kept): (Vec<_>, Vec<_>) = train.iter().enumerate().partition(|(i, _)| i % VALIDATION == 0);
        let rows =
            |part: Vec<(usize, &usize)>| problem.pick(&part.into_iter().map(|(_, &row)| row).collect::<Vec<_>>());
        let stop = class.choose_stop(&rows(kept), &rows(asked), self.seed, &mut tick);
        class.fit_until(&problem.pick(train), stop, self.seed, &mut tick)
    }

    /// Training and held-out queries of a fold.
    fn split(&self, n: usize, fold: usize) -> (Vec<usize>, Vec<usize>) {
        let order = self.order(n, 1);
        let (held_out, train): (Vec<_>, Vec<_>) =
            order.into_iter().enumerate().partition(|(i, _)| i % self.folds == fold);
        let rows = |part: Vec<(usize, usize)>| part.into_iter().map(|(_, row)| row).collect();
        (rows(train), rows(held_out))
    }

    fn order(&self, n: usize, stream: u64) -> Vec<usize> {
        let mut generator = ChaCha8Rng::seed_from_u64(self.seed);
        generator.set_stream(stream);
        let mut order: Vec<usize> = (0..n).collect();
        shuffle(&mut order, &mut generator);
        order
    }

    fn step_units(&self, job: Job) -> u64 {
        let width = match self.classes[job.class] {
            Class::LogLinear => 1,
            Class::LogQuadratic { rank } => rank,
        };
        (self.groups[job.group].problem.len() * width) as u64
    }
}

/// One of so many training queries says when to stop.
const VALIDATION: usize = 5;

impl Row {
    /// Share of the best constant model's gap that a class closes: in sample, on held-out queries, shuffled.
    pub fn closed(&self, gaps: &Gaps) -> [f64; 3] {
        let share = |gap: f64, of: f64| if of > 0.0 { 1.0 - gap / of } else { 0.0 };
        [
            share(gaps.in_sample, self.constant.in_sample),
            share(gaps.held_out, self.constant.held_out),
            share(gaps.shuffled, self.constant.shuffled),
        ]
    }

    /// What the figures mean, in a sentence.
    pub fn verdict(&self) -> String {
        if self.constant.in_sample < NOTHING {
            return "One model is the best on every query: there is nothing to route.".to_owned();
        }
        let classes = [("log-linear", &self.log_linear), ("log-quadratic", &self.log_quadratic)];
        let [linear, quadratic] = classes.map(|(_, gaps)| self.closed(gaps));
        let in_sample = format!(
            "In sample, the log-linear class closes {} of the gap between the best constant model and the best model of \
             each query, and the log-quadratic class {}. With rewards shuffled across queries, where there is nothing to \
             learn, they close {} and {}",
            percent(linear[0]),
            percent(quadratic[0]),
            percent(linear[2]),
            percent(quadratic[2]),
        );
        let winners: Vec<(&str, f64)> = classes
            .into_iter()
            .filter(|(_, gaps)| gaps.carries_over())
            .map(|(name, gaps)| (name, self.closed(gaps)[1]))
            .collect();
        let held_out = match &winners[..] {
            [] if classes.iter().any(|(_, gaps)| gaps.memorises(self)) => {
                "On held-out queries neither beats the best constant model: they memorise the queries, and the data set does \
                 not show which model a new query needs"
                    .to_owned()
            }
            [] => "On held-out queries neither beats the best constant model: what they fit does not generalise to new \
                   queries"
                .to_owned(),
            [(name, share)] => format!(
                "On held-out queries only the {name} class beats the best constant model, and closes {} of its gap: \
                 routing new queries pays by that much",
                percent(*share)
            ),
            _ => format!(
                "On held-out queries both beat the best constant model, and close {} and {} of its gap: routing new queries \
                 pays by that much",
                percent(linear[1]),
                percent(quadratic[1])
            ),
        };
        format!("{in_sample}. {held_out}.")
    }
}

impl Gaps {
    /// Whether held-out queries earn more than by the best constant model, by more than chance would have it.
    pub fn carries_over(&self) -> bool {
        self.held_out_gain > 2.0 * self.held_out_error && self.held_out_gain > NOTHING
    }

    /// Whether rewards without any structure are fitted nearly as well.
    fn memorises(&self, row: &Row) -> bool {
        let [in_sample, _, shuffled] = row.closed(self);
        in_sample > 0.0 && shuffled > 0.8 * in_sample
    }
}

/// Differences of rewards that are rounding.
const NOTHING: f64 = 1e-6;

fn percent(share: f64) -> String {
    // Adding zero turns a rounded "-0" into "0".
    format!("{:.0}%", (100.0 * share).round() + 0.0)
}

fn mean_and_error(values: &[f64]) -> (f64, f64) {
    let n = values.len().max(1) as f64;
    let mean = values.iter().sum::<f64>() / n;
    let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0).max(1.0);
    (mean, (variance / n).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(constant: f64, linear: [f64; 3], quadratic: [f64; 3]) -> Row {
        let gaps = |[in_sample, held_out, shuffled]: [f64; 3]| Gaps {
            in_sample,
            held_out,
            held_out_gain: constant - held_out,
            held_out_error: 0.01,
            shuffled,
        };
        Row {
            name: "all".to_owned(),
            queries: 100,
            constant: gaps([constant; 3]),
            log_linear: gaps(linear),
            log_quadratic: gaps(quadratic),
        }
    }

    #[test]
    fn the_verdict_follows_the_figures() {
        for (row, expected) in [
            (row(0.0, [0.0; 3], [0.0; 3]), "nothing to route"),
            (row(0.1, [0.01, 0.11, 0.01], [0.001, 0.1, 0.002]), "90% of the gap"),
            (row(0.1, [0.01, 0.11, 0.01], [0.001, 0.1, 0.002]), "neither beats the best constant model: they memorise"),
            (row(0.1, [0.05, 0.11, 0.09], [0.03, 0.1, 0.08]), "neither beats the best constant model: what they fit"),
            // A gain within two standard errors is none.
            (row(0.1, [0.05, 0.11, 0.09], [0.03, 0.085, 0.08]), "neither beats"),
            (row(0.1, [0.09, 0.1, 0.09], [0.02, 0.04, 0.08]), "only the log-quadratic class beats"),
            (row(0.1, [0.09, 0.1, 0.09], [0.02, 0.04, 0.08]), "closes 60% of its gap"),
            (row(0.1, [0.02, 0.04, 0.09], [0.09, 0.2, 0.08]), "only the log-linear class beats"),
            (
                row(0.1, [0.02, 0.04, 0.09], [0.01, 0.02, 0.08]),
                "both beat the best constant model, and close 60% and 80%",
            ),
        ] {
            let verdict = row.verdict();
            assert!(verdict.contains(expected) && verdict.ends_with('.'), "{verdict}");
        }
    }

    #[test]
    fn every_query_is_held_out_once() {
        for (n, folds) in [(10, 2), (11, 5), (407, 5)] {
            let study = Study::new(Vec::new(), 1, folds, 3);
            let mut held_out: Vec<usize> = Vec::new();
            for fold in 0..folds {
                let (train, test) = study.split(n, fold);
                assert!(train.len() + test.len() == n && test.iter().all(|row| !train.contains(row)));
                held_out.extend(test);
            }
            held_out.sort_unstable();
            assert_eq!(held_out, (0..n).collect::<Vec<_>>());
        }
    }

    /// Model 0 is best for half of the queries by a little, model 1 for the rest by a lot.
    #[test]
    fn constants_are_chosen_on_the_training_queries() {
        let rewards = |i: usize| if i.is_multiple_of(2) { [0.6, 0.5] } else { [0.1, 0.9] };
        let queries = (0..40).flat_map(|i| [(i as f32).cos(), (i as f32).sin()]).collect();
        let problem = Problem::new(2, 2, queries, (0..40).flat_map(rewards).collect());
        let study = Study::new(vec![Group { name: "all".to_owned(), problem }], 1, 4, 1);
        let jobs = study.jobs();
        assert_eq!(jobs.len(), 2 * (2 + 4));
        let ticked = std::cell::Cell::new(0);
        let outcomes: Vec<Outcome> =
            jobs.iter().map(|job| study.run(*job, |units| ticked.set(ticked.get() + units))).collect();
        assert_eq!(ticked.get(), jobs.iter().map(|job| study.units(*job)).sum::<u64>());
        let row = &study.rows(&outcomes)[0];
        assert!((row.constant.in_sample - 0.05).abs() < 1e-9 && (row.constant.held_out - 0.05).abs() < 1e-9, "{row:?}");
        for gaps in [row.log_linear, row.log_quadratic] {
            assert!(
                (0.0..0.3).contains(&gaps.in_sample) && gaps.held_out.is_finite() && gaps.shuffled >= 0.0,
                "{row:?}"
            );
            let gain = row.constant.held_out - gaps.held_out;
            assert!((gaps.held_out_gain - gain).abs() < 1e-12);
        }
    }
}
