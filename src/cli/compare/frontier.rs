//! `pointsman compare --budget`: quality against cost.

use anyhow::Context;
use serde_json::{Value, json};

use super::{Args, Summary, draw_world, facts, gap};
use crate::cli::contestants::{Contestant, contestants};
use crate::cli::figures::{mean_and_deviation, percent, spread};
use crate::cli::output::{outln, width};
use crate::cli::progress::{Jobs, Unit};
use crate::cli::{Failure, outputs, parallel, write_csv, write_page, write_pngs};
use crate::config::{LearnerConfig, ObjectiveConfig, OutcomeConfig};
use crate::learner::Trainer;
use crate::report::{Block, Cloud, Column, Look, Page, Scatter, Section, Table};
use crate::simulate::World;
use crate::simulate::history::History;
use crate::simulate::ledger::{Ledger, Point};
use crate::simulate::priced::{PriceSpec, Priced};
use crate::simulate::run::{COST, InProcess, Plan, run as run_loop};

/// Algorithms that can keep a budget, where none are named.
const DEFAULT_ALGORITHMS: [&str; 2] = ["hpg", "hypentropy-regression"];

/// A drawn request costs at most this, on the scale of the simulated prices.
const COST_MAX: f64 = 1e6;

/// Budgets of the drawn frontier.
const FRONTIER: usize = 120;

/// An algorithm with one budget.
struct Player {
    contestant: Contestant,
    budget: f64,
}

/// What one player came to in one run.
struct Outcome {
    played: Point,
    possible: Point,
    /// Largest overspending of a window, and largest underspending.
    worst: [f64; 2],
    summary: Summary,
    /// What does not depend on the player; of the first player only.
    reference: Option<Reference>,
}

/// What single models give, and what is possible.
struct Reference {
    alone: Vec<Point>,
    uniform: Point,
    frontier: Vec<Point>,
}

/// Runs the command.
pub fn run(args: &Args, base: &LearnerConfig) -> Result<(), Failure> {
    let named: Vec<String> = DEFAULT_ALGORITHMS.map(str::to_owned).to_vec();
    let asked = if args.algorithms.join(",") == super::DEFAULT_ALGORITHMS { &named } else { &args.algorithms };
    let mut players = Vec::new();
    for &budget in &args.budget {
        let cost = OutcomeConfig { range: Some([0.0, COST_MAX]), budget: Some(budget), ..OutcomeConfig::default() };
        let objective = ObjectiveConfig { floor: None, outcomes: [(COST.to_owned(), cost)].into() };
        let objective = objective.check().map_err(|e| Failure::Usage(e.into()))?;
        for Contestant { name, spec } in contestants(asked, base).map_err(Failure::Usage)? {
            let spec = spec.with_objective(&objective).with_context(|| format!("--algorithms {name}"));
            players.push(Player { contestant: Contestant { name, spec: spec.map_err(Failure::Usage)? }, budget });
        }
    }
    outputs::check(
        &[("--report", Some(&args.report)), ("--png", args.png.as_deref())],
        &[("--csv", args.csv.as_deref())],
    )?;
    let outcomes = run_all(args, &players)?;
    let of = |player: usize| &outcomes[player * args.runs as usize..][..args.runs as usize];
    let table = table(args, &players, &of);
    let page = page(args, &players, &of, &table);
    let path = write_page(&args.report, "compare", &page)?;
    write_pngs(args.png.as_deref(), "compare", &page)?;
    write_csv(args.csv.as_deref(), &[&table])?;
    if args.json {
        let mut value = to_json(args, &players, &of);
        value["report"] = json!(path);
        outln!("{value}")?;
    } else {
        outln!("{}", table.text(width()))?;
        outln!("Report with the frontier: {}", path.display())?;
    }
    Ok(())
}

fn run_all(args: &Args, players: &[Player]) -> anyhow::Result<Vec<Outcome>> {
    let jobs: Vec<(usize, u64)> =
        (0..players.len()).flat_map(|i| (0..args.runs).map(move |run| (i, args.seed.wrapping_add(run)))).collect();
    let progress = Jobs::new("comparing", jobs.iter().map(|(i, _)| *i).collect(), args.rounds, Unit::Of("rounds"));
    let numbered: Vec<_> = jobs.iter().enumerate().collect();
    let outcomes = parallel::map(&numbered, |&(number, &(i, seed))| {
        progress.begin(number);
        run_one(args, &players[i], seed, i == 0, |rounds| {
            progress.advance(number, rounds, || players[i].contestant.name.clone());
        })
    });
    progress.finish();
    outcomes.into_iter().collect()
}

fn run_one(args: &Args, player: &Player, seed: u64, is_first: bool, advance: impl Fn(u64)) -> anyhow::Result<Outcome> {
    let prices = PriceSpec { noise: args.cost_noise, reprice_at: args.reprice_at, seed };
    let mut world = Priced::new(draw_world(args, None, seed)?, prices);
    let &Args { rounds, delay, refresh, lost, switch_at, .. } = args;
    let plan = Plan { rounds, delay, refresh, lost, switch_at, seed };
    let mut trainer = Trainer::new(player.contestant.spec.clone());
    let mut history = History::new(rounds, super::BINS);
    let stride = (rounds / 100).max(1);
    let least = world.costs().map_or(0.0, |costs| costs.expected.iter().fold(f64::MAX, |a, b| a.min(*b)));
    run_loop(&mut world, &mut InProcess::new(&mut trainer, refresh), &plan, &mut history, |history| {
        if history.rounds().is_multiple_of(stride) {
            advance(stride);
        }
    })?;
    let ledger = history.ledger();
    let rounds = ledger.rounds();
    let (begin, length) = windows(rounds);
    Ok(Outcome {
        played: ledger.played(0..rounds),
        possible: ledger.best_fixed(0..rounds, player.budget),
        worst: ledger.worst_windows(player.budget, begin, length),
        summary: history.summary(1.0),
        reference: is_first.then(|| Reference::of(ledger, world.models(), least)),
    })
}

/// Requests after which a budget must hold, and over how many: 5,000 and 10,000 of 40,000 or more.
fn windows(rounds: usize) -> (usize, usize) {
    (5000.min(rounds / 8), 10_000.min(rounds / 4))
}

impl Reference {
    fn of(ledger: &Ledger, models: usize, least: f64) -> Self {
        let all = 0..ledger.rounds();
        let most = ledger.best_fixed(all.clone(), f64::MAX).cost.max(least);
        let budget = |i: usize| least * (most / least).powf(i as f64 / (FRONTIER - 1) as f64);
        Self {
            alone: (0..models).map(|m| ledger.alone(all.clone(), m)).collect(),
            uniform: ledger.uniform(all.clone()),
            frontier: (0..FRONTIER).map(|i| ledger.best_fixed(all.clone(), budget(i))).collect(),
        }
    }
}

/// The mean of points of several runs.
fn mean(points: impl Iterator<Item = Point>) -> Point {
    let points: Vec<Point> = points.collect();
    let of = |x: fn(&Point) -> f64| mean_and_deviation(&points.iter().map(x).collect::<Vec<_>>()).0;
    Point { cost: of(|p| p.cost), quality: of(|p| p.quality) }
}

fn references<'a>(of: &dyn Fn(usize) -> &'a [Outcome]) -> Vec<&'a Reference> {
    of(0).iter().filter_map(|outcome| outcome.reference.as_ref()).collect()
}

fn model_name(m: usize) -> String {
    format!("always model-{}", m + 1)
}

fn table<'a>(args: &Args, players: &[Player], of: &dyn Fn(usize) -> &'a [Outcome]) -> Table {
    let mut columns = vec![Column::left("policy")];
    columns.extend(["budget", "cost", "over at most", "quality", "possible", "of possible"].map(Column::right));
    let figures = |i: usize, figure: &dyn Fn(&Outcome) -> f64| of(i).iter().map(figure).collect::<Vec<_>>();
    let row = |(i, player): (usize, &Player)| {
        vec![
            player.contestant.name.clone(),
            player.budget.to_string(),
            spread(&figures(i, &|o| o.played.cost), 4, ""),
            percent(&figures(i, &|o| o.worst[0])),
            spread(&figures(i, &|o| o.played.quality), 4, ""),
            spread(&figures(i, &|o| o.possible.quality), 4, ""),
            percent(&figures(i, &|o| o.played.quality / o.possible.quality)),
        ]
    };
    let mut rows: Vec<Vec<String>> = players.iter().enumerate().map(row).collect();
    let references = references(of);
    let mut fixed = |name: String, point: &dyn Fn(&Reference) -> Point| {
        let figures = |x: fn(&Point) -> f64| references.iter().map(|r| x(&point(r))).collect::<Vec<_>>();
        let (cost, quality) = (figures(|p| p.cost), figures(|p| p.quality));
        let none = String::new;
        rows.push(vec![name, none(), spread(&cost, 4, ""), none(), spread(&quality, 4, ""), none(), none()]);
    };
    (0..args.models).for_each(|m| fixed(model_name(m), &|r| r.alone[m]));
    fixed("uniform".to_owned(), &|r| r.uniform);
    fixed("best policy, whatever it costs".to_owned(), &|r| r.frontier[FRONTIER - 1]);
    let (begin, length) = windows(args.rounds as usize);
    let runs =
        if args.runs > 1 { format!("mean ± standard deviation of {} runs; ", args.runs) } else { String::new() };
    let note = format!(
        "{runs}over at most: largest overspending of the budget over any {length} successive queries after the first {begin}; \
         possible: quality of the best fixed policy with that budget, which knows the expected rewards"
    );
    Table { columns, rows, note: Some(note) }
}

fn page<'a>(args: &Args, players: &[Player], of: &dyn Fn(usize) -> &'a [Outcome], table: &Table) -> Page {
    let cloud = |name: &str, look: Look, points: Vec<Point>| Cloud {
        name: name.to_owned(),
        points: points.iter().map(|p| (p.cost, p.quality)).collect(),
        look,
    };
    let references = references(of);
    let each = |point: &dyn Fn(&Reference) -> Point| mean(references.iter().map(|r| point(r)));
    let mut names: Vec<&str> = players.iter().map(|player| player.contestant.name.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    let played = |name: &str| {
        let is_of = |(_, player): &(usize, &Player)| player.contestant.name == name;
        players.iter().enumerate().filter(is_of).map(|(i, _)| mean(of(i).iter().map(|o| o.played))).collect()
    };
    let mut clouds: Vec<Cloud> = names.iter().map(|name| cloud(name, Look::Bright, played(name))).collect();
    let alone = (0..args.models).map(|m| each(&|r| r.alone[m])).collect();
    clouds.push(cloud("one model", Look::Bright, alone));
    clouds.push(cloud("uniform", Look::Bright, vec![each(&|r| r.uniform)]));
    clouds.push(cloud("possible", Look::Grey, (0..FRONTIER).map(|i| each(&|r| r.frontier[i])).collect()));
    let chart = Scatter {
        title: "Quality against cost, mean of the runs".to_owned(),
        x_label: "mean cost of a query".to_owned(),
        y_label: "mean reward".to_owned(),
        clouds,
        limits: None,
    };
    let mut facts: Vec<(String, String)> = facts(args, None);
    facts.push(("noise of costs".to_owned(), args.cost_noise.to_string()));
    facts.extend(args.reprice_at.map(|round| ("prices change at".to_owned(), format!("round {round}"))));
    Page {
        title: "Pointsman compare".to_owned(),
        lead: "Quality against cost: what algorithms with a budget played, what single models would have given, and what the best \
               fixed policy of each budget would have earned. All met the same queries, prices and random numbers."
            .to_owned(),
        facts,
        sections: vec![Section {
            heading: "Quality against cost".to_owned(),
            text: None,
            body: vec![Block::Chart(chart.html()), Block::Table(table.clone())],
        }],
    }
}

fn to_json<'a>(args: &Args, players: &[Player], of: &dyn Fn(usize) -> &'a [Outcome]) -> Value {
    let row = |(i, player): (usize, &Player)| {
        let all = |figure: &dyn Fn(&Outcome) -> f64| of(i).iter().map(figure).collect::<Vec<f64>>();
        json!({
            "algorithm": player.contestant.name,
            "budget": player.budget,
            "cost": all(&|o| o.played.cost),
            "over_at_most": all(&|o| o.worst[0]),
            "under_at_most": all(&|o| o.worst[1]),
            "quality": all(&|o| o.played.quality),
            "possible_cost": all(&|o| o.possible.cost),
            "possible_quality": all(&|o| o.possible.quality),
            "gap_closed": all(&|o| gap(&o.summary)),
        })
    };
    let references = references(of);
    let fixed = |point: &dyn Fn(&Reference) -> Point| {
        let all = |x: fn(&Point) -> f64| references.iter().map(|r| x(&point(r))).collect::<Vec<_>>();
        json!({ "cost": all(|p| p.cost), "quality": all(|p| p.quality) })
    };
    json!({
        "settings": facts(args, None).into_iter().collect::<std::collections::BTreeMap<_, _>>(),
        "seeds": (0..args.runs).map(|run| args.seed.wrapping_add(run)).collect::<Vec<_>>(),
        "algorithms": players.iter().enumerate().map(row).collect::<Vec<_>>(),
        "models": (0..args.models).map(|m| fixed(&|r| r.alone[m])).collect::<Vec<_>>(),
        "uniform": fixed(&|r| r.uniform),
        "possible": (0..FRONTIER).map(|i| fixed(&|r| r.frontier[i])).collect::<Vec<_>>(),
    })
}
