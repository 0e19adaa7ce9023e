//! HPG with a critic: the paper's policy and mirror step, with the expected gradient under predicted rewards.
//!
//! ```text
//! policy     pi(m | q) = softmax of q~'W_m q~ - tolls          q~ = (q, 1/2) / |(q, 1/2)|: gives W a linear part and a bias
//! objective  E_q[sum_m pi_m s_m(q) + H(pi) / S]                s: the critic's scores;  H: entropy;  S: its steepness
//! gradient   c_m = pi_m (g_m - sum_j pi_j g_j)                 g_m = s_m(q) - q~'W_m q~ / S
//! mirror     Y_m += eta c_m q~ q~', project, keep the rank     every few examples
//! distil     W_m <- the ball's closest to S s_m                when the critic has solved its regression
//! ```
//!
//! REINFORCE sees one reward of one model; the expected gradient uses what the critic knows of all of them. It does not
//! depend on the reward of its example, so it need not be taken at every example. The entropy keeps the policy from
//! deciding before the critic knows; S grows as it does.
//!
//! Tolls are what models pay for their outcomes ([`crate::objective`]), and pi is conditioned on the models that could answer.
//! Neither enters g: W learns the quality alone.
//!
//! The gradient vanishes where q~'W_m q~ = S s_m(q) up to a constant. Distilling is the step that goes there at once, as
//! far as rank and ball allow: a second-order step, of which the mirror steps are the fine adjustment. The paper's
//! projection and rank apply to both.

use serde::{Deserialize, Serialize};

use super::critic::form::{Expanded, Form};
use super::critic::{Critic, CriticSpec};
use super::linalg::{axpy, rotated, symmetric_eigen};
use super::projection::Ball;
use super::schedule::shrink;
use super::spectra::{Eigen, Gradient, Spectra, Step, extend_basis};
use crate::config::Mode;
use crate::event::{Example, Query};
use crate::learner::{Learner, Lesson};
use crate::objective::pay;
use crate::router::{HeadTable, Sampling, ScoreForm};
use crate::wire::records::learner::AlgorithmRecord;
use crate::wire::records::learner::critic::CriticLearnerRecord;
use crate::wire::records::learner::hpg::HpgRecord;

/// Checked settings of HPG with a critic.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ActorCriticSpec {
    /// Feasible set of the policy's parameters.
    pub ball: Ball,
    /// Representation of the policy's parameters.
    pub mode: Mode,
    /// eta
    pub eta: f64,
    /// The critic.
    pub critic: CriticSpec,
}

/// The learner.
#[derive(Debug, Clone)]
pub struct ActorCritic {
    spec: ActorCriticSpec,
    dim: usize,
    models: usize,
    half_life: Option<f64>,
    critic: Critic,
    /// W, on queries with one more component.
    actor: Spectra,
    scratch: Scratch,
}

/// Memory of a step, and no state.
#[derive(Debug, Clone, Default)]
struct Scratch {
    /// q~
    query: Vec<f64>,
    policy: Vec<f64>,
    gradient: Vec<f64>,
    /// q~ of the next examples, one after the other.
    ahead: Vec<f64>,
}

/// The component that every query gets.
const CONSTANT: f64 = 0.5;

/// Examples from one mirror step to the next.
const STEP_EVERY: u64 = 4;

impl ActorCritic {
    /// Nothing known.
    pub fn new(spec: ActorCriticSpec, dim: usize, models: usize, half_life: Option<f64>) -> Self {
        let critic = Critic::new(spec.critic.clone(), dim, models, half_life);
        let actor = Spectra::new(spec.mode, dim + 1, models);
        Self { spec, dim, models, half_life, critic, actor, scratch: Scratch::default() }
    }

    /// Restores a record; none if it does not fit.
    pub fn restore(
        spec: ActorCriticSpec,
        dim: usize,
        models: usize,
        half_life: Option<f64>,
        record: CriticLearnerRecord,
    ) -> Option<Self> {
        let HpgRecord { ball, parameters } = record.actor?;
        let critic = Critic::restore(spec.critic.clone(), dim, models, half_life, record.critic)?;
        let actor = Spectra::from_record(parameters, &ball, spec.mode, &spec.ball, dim + 1, models)?;
        Some(Self { spec, dim, models, half_life, critic, actor, scratch: Scratch::default() })
    }

    /// Starts from a policy that HPG learned without a critic in `version` examples.
    pub fn from_policy(
        spec: ActorCriticSpec,
        dim: usize,
        models: usize,
        half_life: Option<f64>,
        (record, version): (HpgRecord, u64),
    ) -> Option<Self> {
        let mut learner = Self::new(spec, dim, models, half_life);
        let ball = Ball {
            tau: record.ball.radius,
            beta: record.ball.scale,
            rank: usize::try_from(record.ball.rank).ok()?.min(dim),
        };
        let mode = if matches!(learner.spec.mode, Mode::Lazy) { Mode::Factored } else { learner.spec.mode };
        let policy = Spectra::from_record(record.parameters, &record.ball, mode, &ball, dim, models)?;
        learner.critic.start_at(version);
        for (model, eigen) in policy.eigens(&ball, dim).iter().enumerate() {
            learner.set(model, &eigen.lambda, &eigen.vectors);
        }
        Some(learner)
    }

    /// Moves the policy to the one that the critic's scores ask for.
    fn distil(&mut self) {
        let forms: Vec<Form> = (0..self.models).map(|m| self.critic.form(m)).collect();
        let share = (self.models as f64).recip();
        // What all models share changes no policy; without it the ball has more room.
        let (linear, quadratic) = (vec![0.0; forms[0].linear.len()], vec![0.0; forms[0].quadratic.len()]);
        let mut mean = Form { linear, quadratic, ..Form::default() };
        for form in &forms {
            mean.constant += share * form.constant;
            axpy(share, &form.linear, &mut mean.linear);
            axpy(share, &form.quadratic, &mut mean.quadratic);
        }
        for (model, mut form) in forms.into_iter().enumerate() {
            form.constant -= mean.constant;
            axpy(-1.0, &mean.linear, &mut form.linear);
            axpy(-1.0, &mean.quadratic, &mut form.quadratic);
            let eigen = self.target(&form);
            self.actor.set(model, eigen, self.dim + 1);
        }
    }

    /// The W of rank and ball that is closest to S times a form: W~ of q~ = (q, 1/2) / |(q, 1/2)|.
    fn target(&self, form: &Form) -> Eigen {
        let dim = self.dim;
        let Expanded { constant, basis, linear, quadratic } = form.expand(self.critic.basis(), dim);
        let n = linear.len();
        let scale = (1.0 + CONSTANT * CONSTANT) * self.critic.steepness();
        let mut longer: Vec<f64> = Vec::with_capacity((dim + 1) * (n + 1));
        basis.chunks_exact(dim).for_each(|vector| longer.extend(vector.iter().copied().chain([0.0])));
        longer.extend(std::iter::repeat_n(0.0, dim).chain([1.0]));
        let mut matrix = vec![0.0; (n + 1) * (n + 1)];
        for (j, column) in matrix.chunks_exact_mut(n + 1).enumerate() {
            if j < n {
                let of_column = column.iter_mut().zip(&quadratic[j * n..(j + 1) * n]);
                of_column.for_each(|(entry, x)| *entry = scale * x);
                column[n] = 0.5 / CONSTANT * scale * linear[j];
            } else {
                let of_column = column.iter_mut().zip(&linear);
                of_column.for_each(|(entry, x)| *entry = 0.5 / CONSTANT * scale * x);
                column[n] = scale / (CONSTANT * CONSTANT) * constant;
            }
        }
        let (lambda, rotation) = symmetric_eigen(n + 1, &matrix);
        Eigen::from_primal(&self.spec.ball, &lambda, &rotated(&longer, &rotation, dim + 1), dim + 1)
    }

    /// One mirror step along the expected gradient.
    fn step(&mut self, lesson: &Lesson) {
        let query = lesson.example.query();
        let Scratch { query: longer, policy, gradient, .. } = &mut self.scratch;
        lengthen(query.as_slice(), longer);
        policy.resize(self.models, 0.0);
        gradient.resize(self.models, 0.0);
        self.actor.look(&self.spec.ball, longer, policy);
        self.critic.scores(query, gradient);
        let rest = self.critic.steepness().recip();
        gradient.iter_mut().zip(&*policy).for_each(|(g, score)| *g -= rest * score);
        pay(policy, &lesson.tolls);
        Sampling::Softmax.turn_among(policy, lesson.example.eligible());
        let mean: f64 = policy.iter().zip(&*gradient).map(|(p, g)| p * g).sum();
        gradient.iter_mut().zip(&*policy).for_each(|(g, p)| *g = p * (*g - mean));
        let shrink = shrink(self.half_life, STEP_EVERY as usize);
        let step = Step { ball: &self.spec.ball, rate: self.spec.eta, shrink };
        self.actor.step(&step, &[Gradient { query: longer, coefficients: gradient }]);
    }
}

/// q~
fn lengthen(query: &[f64], longer: &mut Vec<f64>) {
    let scale = CONSTANT.hypot(1.0).recip();
    longer.clear();
    longer.extend(query.iter().map(|x| x * scale));
    longer.push(CONSTANT * scale);
}

/// A score of q~ as one of q: constant, linear and quadratic part.
fn shorten(eigen: &Eigen, dim: usize) -> (f64, Vec<f64>, Vec<f64>, Vec<f64>) {
    let square = (1.0 + CONSTANT * CONSTANT).recip();
    let (mut constant, mut linear) = (0.0, vec![0.0; dim]);
    let (mut values, mut vectors) = (Vec::new(), Vec::new());
    for (lambda, vector) in eigen.lambda.iter().zip(eigen.vectors.chunks_exact(dim + 1)) {
        let (vector, last) = (&vector[..dim], CONSTANT * vector[dim]);
        let length = super::linalg::dot(vector, vector).sqrt();
        constant += square * lambda * last * last;
        axpy(2.0 * square * lambda * last, vector, &mut linear);
        if length > 0.0 {
            values.push(square * lambda * length * length);
            vectors.extend(vector.iter().map(|x| x / length));
        }
    }
    (constant, linear, values, vectors)
}

impl Learner for ActorCritic {
    fn scores(&self, query: &Query, scores: &mut [f64]) {
        let mut longer = Vec::new();
        lengthen(query.as_slice(), &mut longer);
        self.actor.scores(&self.spec.ball, &longer, scores);
        self.critic.finish(query, scores);
    }

    fn look(&mut self, query: &Query, scores: &mut [f64]) {
        let longer = &mut self.scratch.query;
        lengthen(query.as_slice(), longer);
        self.actor.look(&self.spec.ball, longer, scores);
        self.critic.look(query);
        self.critic.finish(query, scores);
    }

    fn foresight(&self) -> usize {
        self.actor.foresight()
    }

    fn expect(&mut self, examples: &[Example]) {
        let Scratch { query: longer, ahead, .. } = &mut self.scratch;
        ahead.clear();
        for example in examples {
            lengthen(example.query().as_slice(), longer);
            ahead.extend_from_slice(longer);
        }
        self.actor.expect(ahead.chunks_exact(self.dim + 1));
        self.critic.expect(examples);
    }

    fn predict(&self, query: &Query, _scores: &[f64], _mean: f64, rewards: &mut [f64]) -> bool {
        self.critic.predict(query, rewards);
        true
    }

    fn apply(&mut self, batch: &[Lesson], version: u64) {
        for (at, lesson) in (version..).zip(batch) {
            if at.is_multiple_of(STEP_EVERY) {
                self.critic.look(lesson.example.query());
                self.step(lesson);
            }
            if self.critic.learn(&lesson.example) {
                self.distil();
            }
        }
    }

    fn score_forms(&self) -> Vec<ScoreForm> {
        let single = |values: &[f64]| values.iter().map(|&x| x as f32).collect();
        let form = |(m, eigen): (usize, &Eigen)| {
            let (constant, linear, values, vectors) = shorten(eigen, self.dim);
            ScoreForm {
                eigenvalues: single(&values),
                eigenvectors: single(&vectors),
                linear: single(&linear),
                bias: (constant + self.critic.fallback(m)) as f32,
            }
        };
        self.actor.eigens(&self.spec.ball, self.dim + 1).iter().enumerate().map(form).collect()
    }

    fn head_table(&self) -> HeadTable {
        self.critic.head_table()
    }

    fn eigens(&self) -> Vec<Eigen> {
        let quadratic = |eigen: &Eigen| {
            let (_, _, lambda, vectors) = shorten(eigen, self.dim);
            orthonormal(&lambda, &vectors, self.dim, self.spec.ball.beta)
        };
        self.actor.eigens(&self.spec.ball, self.dim + 1).iter().map(quadratic).collect()
    }

    fn steepness(&self) -> Option<f64> {
        Some(self.critic.steepness())
    }

    fn set(&mut self, model: usize, lambda: &[f64], vectors: &[f64]) -> bool {
        let steepness = self.critic.steepness();
        let rewards: Vec<f64> = lambda.iter().map(|lambda| lambda / steepness).collect();
        let is_set = self.critic.set(model, &rewards, vectors);
        self.critic.solve();
        self.distil();
        is_set
    }

    fn add(&mut self, other: &AlgorithmRecord) -> bool {
        let is_added = self.critic.add(other);
        if is_added {
            self.distil();
        }
        is_added
    }

    fn remap(&mut self, places: &[Option<usize>]) {
        self.models = places.len();
        self.critic.remap(places);
        self.actor.remap(places, self.dim + 1);
    }

    fn save(&self) -> AlgorithmRecord {
        let actor = Some(HpgRecord { ball: self.spec.ball.record(), parameters: self.actor.record() });
        AlgorithmRecord::Critic(Box::new(CriticLearnerRecord { critic: self.critic.record(), actor }))
    }
}

/// The eigendecomposition of sum_i values_i v_i v_i', for unit vectors that need not be orthogonal.
pub(super) fn orthonormal(values: &[f64], vectors: &[f64], dim: usize, beta: f64) -> Eigen {
    let mut basis = Vec::new();
    vectors.chunks_exact(dim).for_each(|vector| extend_basis(&mut basis, vector));
    let n = basis.len() / dim;
    let mut small = crate::policy::symmetric::Symmetric::identity(n, 0.0);
    let mut coordinates = Vec::new();
    for (value, vector) in values.iter().zip(vectors.chunks_exact(dim)) {
        super::linalg::columns_dot(&basis, vector, &mut coordinates);
        small.add(*value, &coordinates);
    }
    let (lambda, rotation) = small.eigen();
    let gamma = lambda.iter().map(|lambda| (lambda / beta).asinh()).collect();
    Eigen { gamma, lambda, vectors: rotated(&basis, &rotation, dim) }
}
