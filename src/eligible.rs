//! Which models may answer a request.
//!
//! ```text
//! E: the models that may answer      p restricted to E:  p_m / sum_{j in E} p_j for m in E, else 0
//! ```
//!
//! A policy that is conditioned on E is restricted to it. Softmax restricted to E is the softmax of the scores in E.

/// The models that may answer a request: all, or a part of them. Never empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Eligible(Option<Vec<bool>>);

impl Eligible {
    /// All models.
    pub const ALL: Self = Self(None);

    /// The models whose entry is true; `None` if there is none.
    pub fn only(models: Vec<bool>) -> Option<Self> {
        match (models.iter().any(|may| *may), models.iter().all(|may| *may)) {
            (false, _) => None,
            (true, true) => Some(Self::ALL),
            (true, false) => Some(Self(Some(models))),
        }
    }

    /// A set as it was saved, which may be none: to be checked where it is used.
    pub fn of_saved(models: Vec<bool>) -> Self {
        Self(Some(models))
    }

    /// Whether all models may answer.
    pub fn is_all(&self) -> bool {
        self.0.is_none()
    }

    /// Whether a model may answer.
    pub fn allows(&self, model: usize) -> bool {
        self.0.as_ref().is_none_or(|models| models[model])
    }

    /// One entry per model; `None` if all may answer.
    pub fn mask(&self) -> Option<&[bool]> {
        self.0.as_deref()
    }

    /// Restricts a distribution to these models. If it plays none of them, it becomes uniform over them.
    pub fn restrict(&self, distribution: &mut [f64]) {
        let Some(models) = &self.0 else { return };
        distribution.iter_mut().zip(models).filter(|(_, may)| !**may).for_each(|(p, _)| *p = 0.0);
        let sum: f64 = distribution.iter().sum();
        if sum > 0.0 {
            distribution.iter_mut().for_each(|p| *p /= sum);
        } else {
            let share = 1.0 / models.iter().filter(|may| **may).count() as f64;
            distribution.iter_mut().zip(models).for_each(|(p, may)| *p = if *may { share } else { 0.0 });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_distribution_is_renormalised_over_the_eligible_models() {
        assert_eq!(Eligible::only(vec![false, false]), None);
        assert_eq!(Eligible::only(vec![true, true]), Some(Eligible::ALL));
        let part = Eligible::only(vec![true, false, true]).unwrap();
        assert!(part.allows(0) && !part.allows(1) && Eligible::ALL.allows(7));
        for (before, after) in [([0.25, 0.5, 0.25], [0.5, 0.0, 0.5]), ([0.0, 1.0, 0.0], [0.5, 0.0, 0.5])] {
            let mut p = before;
            part.restrict(&mut p);
            assert_eq!(p, after);
            let mut p = before;
            Eligible::ALL.restrict(&mut p);
            assert_eq!(p, before);
        }
    }
}
