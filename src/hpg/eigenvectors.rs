//! The eigenvectors that belong to the roots of the secular equation, many at a time.
//!
//! ```text
//! z_i^2 ~ |prod_j (d_i - x_j) / prod_(j != i) (d_i - d_j)|        the components for which the roots found are exact
//! v_ij ~ z_i / (d_i - x_j)
//! ```

use pulp::{Arch, Simd, WithSimd};

use super::kernel::LANES_MAX;
use super::roots::{Lanes, Places};

/// The components for which the roots found are exact, up to a common factor and their signs.
pub fn refine(poles: &[f64], places: &Places, refined: &mut Vec<f64>) {
    refined.clear();
    refined.resize(poles.len(), 0.0);
    Arch::new().dispatch(Refine { poles, places, refined });
}

/// The eigenvectors of the roots at `places`: the entry of pole i and root j is put at `rows[i]` + j.
pub fn vectors(poles: &[f64], refined: &[f64], places: &Places, rows: &[usize], out: &mut [f64]) {
    Arch::new().dispatch(Vectors { poles, refined, places, rows, out });
}

struct Refine<'a> {
    poles: &'a [f64],
    places: &'a Places,
    refined: &'a mut [f64],
}

impl WithSimd for Refine<'_> {
    type Output = ();

    /// Here a lane is a pole: |product over j of (d_i - x_j) / (d_i - d_j)|, without the pole itself below.
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let one = simd.splat_f64s(1.0);
        for (poles, refined) in self.poles.chunks(S::F64_LANES).zip(self.refined.chunks_mut(S::F64_LANES)) {
            let d = simd.partial_load_f64s(poles);
            let mut product = one;
            // A few factors at a time stay in range, however small some are.
            for start in (0..self.poles.len()).step_by(FACTORS) {
                let (mut above, mut below) = (one, one);
                for j in start..(start + FACTORS).min(self.poles.len()) {
                    let Places { origin, side, offset, .. } = self.places;
                    let [origin, side, offset] = [origin[j], side[j], offset[j]].map(|x| simd.splat_f64s(x));
                    above = simd.mul_f64s(above, Lanes { origin, side, offset }.gap(simd, d));
                    let other = simd.splat_f64s(self.poles[j]);
                    let factor = simd.sub_f64s(d, other);
                    below = simd.mul_f64s(below, simd.select_f64s(simd.equal_f64s(d, other), one, factor));
                }
                product = simd.mul_f64s(product, simd.div_f64s(above, below));
            }
            simd.partial_store_f64s(refined, simd.sqrt_f64s(simd.abs_f64s(product)));
        }
    }
}

const FACTORS: usize = 8;

struct Vectors<'a> {
    poles: &'a [f64],
    refined: &'a [f64],
    places: &'a Places,
    rows: &'a [usize],
    out: &'a mut [f64],
}

impl WithSimd for Vectors<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let lanes = S::F64_LANES;
        for block in 0..self.places.count.div_ceil(lanes) {
            let at = block * lanes;
            let places = Lanes::<S>::load(self.places, block);
            let mut norm = simd.splat_f64s(0.0);
            let mut entry = |inverse: S::f64s, refined: f64, row: usize| {
                let x = simd.mul_f64s(simd.splat_f64s(refined), inverse);
                norm = simd.mul_add_e_f64s(x, x, norm);
                S::as_mut_simd_f64s(&mut self.out[row + at..row + at + lanes]).0[0] = x;
            };
            let (fours, rest) = self.poles.as_chunks::<4>();
            for (i, poles) in fours.iter().enumerate() {
                let inverses = places.inverses(simd, poles.map(|pole| simd.splat_f64s(pole)));
                (0..4).for_each(|l| entry(inverses[l], self.refined[4 * i + l], self.rows[4 * i + l]));
            }
            for (l, &pole) in rest.iter().enumerate() {
                let i = 4 * fours.len() + l;
                let gap = places.gap(simd, simd.splat_f64s(pole));
                entry(simd.div_f64s(simd.splat_f64s(1.0), gap), self.refined[i], self.rows[i]);
            }
            // Lanes beyond the last root are none.
            let real = [1.0; LANES_MAX];
            let real = simd.partial_load_f64s(&real[..lanes.min(self.places.count - at)]);
            let scale = simd.div_f64s(real, simd.sqrt_f64s(norm));
            for &row in self.rows {
                let x = &mut S::as_mut_simd_f64s(&mut self.out[row + at..row + at + lanes]).0[0];
                *x = simd.mul_f64s(*x, scale);
            }
        }
    }
}
